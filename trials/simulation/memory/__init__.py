"""Device memory: the caching allocator, and the batch sizes that fit."""
