"""What replicas tell each other, who claims which reservation, and what follows from it."""
