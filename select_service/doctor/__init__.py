"""`select-service doctor`: asks a running service what is wired wrong, and says it to people."""
