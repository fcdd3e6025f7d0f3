"""What is wired wrong in a fleet, and how one can tell: facts in, findings out."""
