"""Pure rooms of the service: every decision, no clock, no socket, no log."""
