"""A job out: the chosen offers and the recipe as a file that starts the fine-tuning by TRL."""
