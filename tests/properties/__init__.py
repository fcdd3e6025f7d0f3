"""Properties that must hold whatever is done, searched for by Hypothesis."""
