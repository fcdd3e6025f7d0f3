"""HTTP from the socket to the route table: the protocol, the fast lane, ASGI, the API."""
