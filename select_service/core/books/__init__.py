"""What is booked: reservations, their owners and deadlines, and the load they make (the ledger)."""
