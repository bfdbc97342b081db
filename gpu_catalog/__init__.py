"""What a GPU is and what it costs to rent: facts and dated offers, exact keys only."""
