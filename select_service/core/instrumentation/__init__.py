"""The kinds of rooms that trace or record the requests passing through them."""
