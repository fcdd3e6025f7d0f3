"""The verbs of the edge: read the clock, call the core, carry out effects. See `driver.py`."""
