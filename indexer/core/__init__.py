"""Pure rooms of the index: no clock, no socket, no log."""
