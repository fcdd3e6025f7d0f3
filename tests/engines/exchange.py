"""One request to an engine: what was foretold of its prompt, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Flavor:
    """What else names a cached block: a salt and an adapter."""

    salt: str | None = None
    adapter: str | None = None

    @property
    def fields(self) -> dict[str, str]:
        """Of a body to the service."""
        fields = {"cache_salt": self.salt, "lora_name": self.adapter}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass
class Exchange:
    """One request that an engine answered."""

    worker_id: int
    rank: int
    flavor: Flavor
    prompt: list[int]
    foretold: int
    """Tokens that the service took for cached."""
    begun: float
    """The service had applied by then what the engine had published."""
    ended: float = 0.0
    cached: int | None = None
    """Tokens that the engine found; None: the caller left before it said so."""
    output: list[int] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    """Of a wrong prediction: what the service said afterwards."""
