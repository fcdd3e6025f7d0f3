"""The verbs as the edges call them: the clock, the core, its effects. `driver.py` hangs them."""
