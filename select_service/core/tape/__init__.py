"""Recordings: what is noted of a service's life, how it is written, and decisions made again."""
