"""Storage of a run's files, on a local disk or in S3.

Durability is the reason not to use a library such as fsspec or obstore: an observation is synced to
disk before its trial goes on, two drivers never write one run, and an outage stops no measurement.
"""
