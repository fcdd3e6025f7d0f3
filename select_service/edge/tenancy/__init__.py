"""What bearers of tokens bound to tenants see of the service."""
