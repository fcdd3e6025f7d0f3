"""Shadow weights, which score live traffic without acting on it."""
