"""Training steps of tasks beyond supervised fine-tuning, as TRL's trainers take them."""
