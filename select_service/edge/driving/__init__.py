"""Parts of `driver.py`: carrying out effects, event sources, waiting callers, housekeeping."""
