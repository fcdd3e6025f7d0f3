"""Who may do what, and what we show and ask of others: tokens, TLS, keys."""
