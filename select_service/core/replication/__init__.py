"""The replica plane: its messages, the claims on reservations, and their effects."""
