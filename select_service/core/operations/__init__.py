"""What callers can ask for, a file for each kind of verb; `service.py` puts them together."""
