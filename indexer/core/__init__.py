"""The pure core of the index: no clock, no socket, no log."""
