"""`select-service doctor`: shows people what a running service finds misconfigured."""
