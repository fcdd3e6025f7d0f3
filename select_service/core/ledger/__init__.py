"""What is booked: reservations, their owners and deadlines, and their load (the ledger)."""
