"""Offers, their constraints, price drift and the cost of renting."""
