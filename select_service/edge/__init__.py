"""The rim of the service: sockets, HTTP, clocks and metrics around the pure core."""
