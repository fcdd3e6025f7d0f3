"""Detection of miswirings in a fleet: facts in, findings out."""
