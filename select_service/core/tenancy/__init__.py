"""What tenants may hold of the bounds that they have in common."""
