"""Leases: which of two planners for the same engines may act."""
