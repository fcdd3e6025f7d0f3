"""The rim of the index: sockets and timers around the pure core."""
