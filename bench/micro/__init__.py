"""One structure at a time, in one process: what a single operation costs."""
