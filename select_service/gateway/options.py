"""All limits and waits of a `Gateway`, with their defaults; none is read from the environment."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct


class GatewayOptions(Struct, frozen=True, kw_only=True):
    """How a gateway behaves; times in seconds."""

    body_bytes_max: int = 8 << 20
    """Bytes of one request; a longer one is refused (413)."""

    answer_bytes_max: int = 8 << 20
    """Bytes of an answer, or of one event of a stream, that are kept to read its usage. A longer
    one is passed on all the same, and its usage is not known."""

    tokenize_timeout_s: float = 1.0
    """How long a prompt may take to be tokenized; without tokens it is placed by load alone. 0:
    engines are not asked."""

    tokenize_calls_max: int = 64
    """Prompts that are tokenized at one time; others are placed by load alone."""

    tokenize_cache_bytes: int = 32 << 20
    """Memory of tokenized prompts."""

    catalog_refresh_s: float = 5.0
    """Age at which the list of workers, and of the models that engines name, is read again."""

    connect_timeout_s: float = 2.0
    """How long a connection to an engine may take."""

    engine_silence_s: float = 600.0
    """Longest silence of an engine, before and within its answer."""

    idle_connections_max: int = 256
    """Connections to engines that are kept for the next request."""

    engines_max: int = 2
    """Workers that are tried before the first byte of an answer; 1: none after the first."""

    ask_usage: bool = True
    """Ask engines to report the usage at the end of a stream, which holds how much of the prompt
    was cached. A client that has not asked for it does not get it."""

    adapters: dict[str, str] = {}
    """LoRA adapters by the name that requests give as `model`, with the model of their workers.
    Those that an engine lists with their base (`parent` in its /v1/models) are known without."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            may_be_zero = name.startswith("tokenize_")
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if value < 0 or (value == 0 and not may_be_zero):
                raise ValueError(f"{name} must be above 0, not {value}")


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
