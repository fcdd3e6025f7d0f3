"""HTTP from socket to route table: connections, exchanges, application, API."""
