"""What each term of `first-token` is worth, on a trace and on workloads it was not tuned on."""
