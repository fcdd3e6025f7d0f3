"""Plain counters of a gateway; `Gateway.stats` shows them."""

from __future__ import annotations

from collections import Counter


class GatewayTraffic:
    """Everything counted since a gateway was created."""

    def __init__(self) -> None:
        self.requests = 0
        self.refused = 0  # answered with an error of ours or of the service
        self.engine_failures = 0  # attempts that an engine did not answer, or with a status of 5xx
        self.retries = 0  # requests that went on to another worker
        self.broken = 0  # answers that an engine broke off
        self.left = 0  # clients that left before the end of their answer
        self.catalog_failures = 0  # lists of workers that could not be read
        self.prompts: dict[str, int] = Counter()  # by where their tokens came from
        self.load_alone: dict[str, int] = Counter()  # prompts without tokens, by reason
        self.limit_hits: dict[str, int] = Counter()  # by option
        self.tokenize_calls = 0
        self.tokenize_seconds = 0.0
        self.cache_bytes = 0  # of tokenized prompts

    def hit_limit(self, name: str) -> None:
        """Count that an option was in the way."""
        self.limit_hits[name] += 1

    def as_dict(self) -> dict[str, float | dict[str, int]]:
        """Return all counters by name."""
        return {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(self).items()
        }
