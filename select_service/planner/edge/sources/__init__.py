"""Sources of windows and loads."""
