"""Where a reservation begins and ends: the desk, pairs of reservations, sessions that stay."""
