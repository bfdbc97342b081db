"""Today's prices: fetched, identified and checked."""
