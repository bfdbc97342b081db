"""Equations, their forms, robust fits, selection, results and failures."""
