"""Recipes of fine-tuning: their axes, their mistakes, their names."""
