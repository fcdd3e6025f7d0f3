"""Where the server's time goes under one workload: py-spy's stacks, a flame graph, a note."""
