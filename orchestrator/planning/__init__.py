"""Plan of a sweep, prices of its nodes, its cost so far and to come, and its faults."""
