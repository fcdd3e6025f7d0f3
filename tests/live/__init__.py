"""Real processes and sockets for tests: a server under test, an HTTP client, an engine.

Everything binds or connects on loopback. Nothing here knows what an answer should be.
"""
