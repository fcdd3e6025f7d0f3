"""Policies side by side on recorded traffic, simulated."""
