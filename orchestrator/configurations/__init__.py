"""Configurations of trainers, read as the options of an estimate."""
