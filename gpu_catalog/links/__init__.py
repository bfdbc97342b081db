"""Speed of collectives: between the GPUs of a node, and between nodes."""
