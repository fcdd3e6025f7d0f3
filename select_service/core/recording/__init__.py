"""Recordings of a service: the notes, their format on disk, and reading them back."""
