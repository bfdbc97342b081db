"""The sweep specification: its YAML, its job, and its mistakes with their lines."""
