"""Sections of the Markdown report, one per subject."""
