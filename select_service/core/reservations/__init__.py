"""The life of a reservation, pairs of reservations, sessions that stay."""
