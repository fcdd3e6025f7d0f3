"""The records behind "why this worker?": kept cheaply, explained when somebody asks."""
