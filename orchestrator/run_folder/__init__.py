"""The folder that holds all files of one sweep."""
