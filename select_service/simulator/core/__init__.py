"""A simulated cluster under a fake clock: engines, selectors and requests."""
