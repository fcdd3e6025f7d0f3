"""Where windows and loads come from."""
