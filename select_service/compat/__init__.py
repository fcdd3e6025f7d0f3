"""The service behind other people's interfaces, for callers that cannot be changed."""
