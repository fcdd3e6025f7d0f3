"""What each term of `first-token` is worth, on a trace and on workloads nobody tuned it on."""
