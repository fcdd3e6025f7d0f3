"""Load: prebuilt HTTP requests over raw sockets, KV events over ZMQ. It measures nothing itself."""
