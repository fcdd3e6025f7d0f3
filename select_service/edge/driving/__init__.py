"""What `driver.py` stands on: effects carried out, event sources, who waits, housekeeping."""
