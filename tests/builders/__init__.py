"""Builders of records that tests start from."""
