"""How many workers there should be: a process of its own beside the service."""
