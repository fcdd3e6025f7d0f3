"""What decides about replica counts; it touches no clock, no network and no disk."""
