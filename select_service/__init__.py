"""Which worker gets the request."""
