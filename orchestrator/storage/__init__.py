"""The bytes of a run: on a local disk or in S3."""
