"""Parsers of the commands. They name the function to run, so that --help imports none."""
