"""Who may act, where two planners run for the same engines."""
