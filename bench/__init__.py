"""Measurements of this service, alone and beside the reference service. See README.md."""
