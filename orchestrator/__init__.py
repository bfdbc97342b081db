"""From a sweep specification to a cost ranking: plan, run on Ray, fit, rank, report."""
