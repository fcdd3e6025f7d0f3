"""The records behind "why this worker?": kept cheaply, explained on request."""
