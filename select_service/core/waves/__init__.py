"""Many prompts placed in one call: the plan, and the way of each to its place."""
