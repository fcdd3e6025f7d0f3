"""What passes between the planner's rooms: readings, windows, needs and decisions.

A reading is a value, or idle (everything could be read, and no request came), or missing (no source
knows). The three are types of their own: no reading is ever silently a zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from msgspec import Struct

Role: TypeAlias = Literal["prefill", "decode", "aggregated"]


@dataclass(frozen=True, slots=True)
class Value:
    """A number was measured; finite."""

    value: float


@dataclass(frozen=True, slots=True)
class Idle:
    """It was asked and nothing happened: there is nothing to average."""


@dataclass(frozen=True, slots=True)
class Missing:
    """It could not be asked, or it is not reported."""

    why: str


Reading: TypeAlias = Value | Idle | Missing
IDLE: Final = Idle()


def number_of(reading: Reading) -> float | None:
    """Return a reading's value; None: it is idle or missing."""
    return reading.value if isinstance(reading, Value) else None


class Moments(NamedTuple):
    """Sums over what ranks were measured to take: `y` seconds at `x` tokens."""

    samples: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0


MOMENTS: Final = ("count", "tokens", "seconds", "tokens_squared", "token_seconds")
"""How the metrics of selectors call its fields, in order."""


class ModelKey(Struct, frozen=True, order=True):
    """Whose traffic it is."""

    model_name: str
    tenant_id: str = "default"

    def __str__(self) -> str:
        return (
            self.model_name
            if self.tenant_id == "default"
            else "/".join((self.model_name, self.tenant_id))
        )


class PoolKey(Struct, frozen=True, order=True):
    """Engines that are scaled together."""

    model: ModelKey
    role: Role

    def __str__(self) -> str:
        return f"{self.model} {self.role}"


_NOT_ASKED: Final = Missing("not asked for")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What happened to one model during one interval."""

    seconds: float
    requests: Reading
    """How many arrived, those that were refused included."""
    isl: Reading = _NOT_ASKED
    osl: Reading = _NOT_ASKED
    ttft_ms: Reading = _NOT_ASKED
    itl_ms: Reading = _NOT_ASKED
    request_s: Reading = _NOT_ASKED
    effective_isl: Reading = _NOT_ASKED
    """Prompt tokens no worker had in its cache, per request."""
    concurrency: Reading = _NOT_ASKED
    """Live requests, on average, of all engines together."""
    isl_mix: tuple[tuple[float, float], ...] = ()
    """(prompt length, share of requests), where a histogram shows it."""
    prefill_moments: Moments | Missing = _NOT_ASKED
    """Of first tokens: over the tokens to compute before them, on their rank."""
    itl_moments: Moments | Missing = _NOT_ASKED
    """Of times between tokens: over the tokens of context that their rank attends to."""
    rank_kv_tokens: Reading = _NOT_ASKED
    """KV tokens that a rank has."""
    prefill_worker_ranks: Reading = _NOT_ASKED
    """Ranks of a worker whose first tokens are measured, on average."""
    decode_worker_ranks: Reading = _NOT_ASKED
    """Likewise, of times between tokens."""
    arrived: Reading = _NOT_ASKED
    """The requests since the last look at the load, if the next look counts from here."""
    arrived_s: float = 0.0
    """The seconds in which they came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How full a model's engines are at this moment; for the fast loop."""

    prefill_backlog_tokens: Reading = _NOT_ASKED
    concurrency: Reading = _NOT_ASKED
    context_tokens: Reading = _NOT_ASKED
    """Mean length of a live request."""
    arrived: Reading = _NOT_ASKED
    """The requests that came in `seconds`, which follow on those of the look before."""
    seconds: float = 0.0
    """0: nothing has been counted since then."""
    ago_s: float = 0.0
    """How long ago those seconds ended: counts that are scraped are older than the look."""

    @property
    def is_counted(self) -> bool:
        """Whether arrivals are being counted, including when nothing new has been."""
        return isinstance(self.arrived, Value | Idle)

    @property
    def requests(self) -> float:
        """The number of `arrived`; 0 unless it is a value."""
        return self.arrived.value if isinstance(self.arrived, Value) else 0.0


@dataclass(frozen=True, slots=True)
class PoolState:
    """What the connector reads back."""

    desired: int
    """As it was asked for last."""
    ready: int
    """Of them, able to serve."""

    @property
    def starting(self) -> int:
        """Asked for and not there yet."""
        return max(0, self.desired - self.ready)


class Target(Struct, frozen=True):
    """How many replicas one pool shall have."""

    model_name: str
    tenant_id: str
    role: Role
    replicas: int

    @classmethod
    def of(cls, pool: PoolKey, replicas: int) -> Target:
        """Return the target of a pool."""
        return cls(pool.model.model_name, pool.model.tenant_id, pool.role, replicas)

    @property
    def pool(self) -> PoolKey:
        """Whose they are."""
        return PoolKey(ModelKey(self.model_name, self.tenant_id), self.role)


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """What shall be, and why, as text."""

    targets: tuple[Target, ...]
    reasons: tuple[str, ...] = ()
    infeasible: tuple[str, ...] = ()
    """Targets that no number of replicas would meet."""
    gpus: int = 0
    terms: dict[str, float] = field(default_factory=dict)
    """Numbers the counts come from, `pool:name`."""
