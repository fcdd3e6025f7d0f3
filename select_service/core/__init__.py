"""The pure core of the service: every decision, no clock, no socket, no log."""
