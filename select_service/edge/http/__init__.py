"""HTTP from socket to route table: protocol, fast lane, ASGI, API."""
