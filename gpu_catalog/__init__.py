"""Facts of GPUs and dated rental offers, looked up by exact key."""
