"""Whether the fleet takes a request at all: refusals, in one fixed order, each with its name."""
