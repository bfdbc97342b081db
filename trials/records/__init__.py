"""Requests and results of a trial: pydantic records, without torch."""
