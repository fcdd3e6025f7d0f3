"""Finds what is wired wrong in a fleet: facts in, findings out."""
