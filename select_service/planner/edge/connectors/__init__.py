"""Connectors, which change replica counts and read them back."""
