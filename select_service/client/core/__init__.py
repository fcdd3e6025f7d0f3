"""The pure core of the client: what to send, when, where, and what an answer means; no I/O."""
