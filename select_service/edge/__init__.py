"""The outer layer of the service: sockets, HTTP, clocks and metrics around the pure core."""
