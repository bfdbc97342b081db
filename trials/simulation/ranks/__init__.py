"""Several GPUs in the simulation: their streams, collectives and buckets. No torch."""
