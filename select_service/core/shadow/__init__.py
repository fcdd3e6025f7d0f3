"""Weights that score live traffic and act on nothing."""
