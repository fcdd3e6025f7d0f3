"""Many prompts placed in one call: the plan, and how each prompt gets to its rank."""
