"""A cluster under a fake clock: engines, selectors and requests, without a clock of its own."""
