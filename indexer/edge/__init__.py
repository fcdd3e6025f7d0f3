"""The edge of the index: sockets, files and timers around the pure core."""
