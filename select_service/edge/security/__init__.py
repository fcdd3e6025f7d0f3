"""Authentication and authorization, ours and of others: tokens, TLS, keys."""
