"""The sweep specification: YAML, the job, and mistakes with their lines."""
