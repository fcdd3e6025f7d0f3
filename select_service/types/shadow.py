"""The shadow policy: what it is given, and what GET /shadow answers.

Weights that score live traffic and act on nothing. How they do is in `core/decisions/shadow.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, get_args

from msgspec import UNSET, Struct, UnsetType, field

from select_service.types.router_config import Policy

if TYPE_CHECKING:
    from collections.abc import Callable

Weight = float | bool | str
"""A string is the policy."""

REGRET_BOUNDS: Final = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
"""Upper bounds of the classes of regret, in blocks; a last class is above them."""


class ShadowSettings(Struct, frozen=True, kw_only=True):
    """The other weights, and what looking at them may cost."""

    weights: Mapping[str, Weight] = {}  # by field of RouterConfig, what differs; none: no shadow
    sample: float = 0.05  # share of the decisions: at 1,000 a second 3,000 a minute are scored
    cost_max: float = 0.01  # share of the time: a hundredth of a core, as the rest of it is busy

    def __post_init__(self) -> None:
        read_shadow_weights(self.weights)
        if not 0.0 < self.sample <= 1.0:
            raise ValueError("shadow_sample must be above 0 and at most 1")
        if not 0.0 < self.cost_max <= 1.0:
            raise ValueError("shadow_cost_max must be above 0 and at most 1")


def _number(value: object) -> dict[str, Weight] | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0.0:  # type: ignore[arg-type,operator]
        raise ValueError("must be a number at least 0")
    return None


def _switch(value: object) -> dict[str, Weight] | None:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")  # noqa: TRY004 - callers catch ValueErrors
    return None


def _policy(value: object) -> dict[str, Weight] | None:
    if value not in get_args(Policy):
        raise ValueError(f"must be {' or '.join(get_args(Policy))}")
    return {"policy": str(value)}


def _router_temperature(value: object) -> dict[str, Weight]:
    _number(value)
    return {"temperature": float(value)}  # type: ignore[arg-type]


def _overlap_score_weight(value: object) -> dict[str, Weight]:
    """The old name of the scale; 0 also sets the credit to 0, as everywhere."""
    _number(value)
    scale = float(value)  # type: ignore[arg-type]
    meant: dict[str, Weight] = {"prefill_load_scale": scale}
    return meant if scale else meant | {"overlap_score_credit": 0.0}


_READERS: Final[Mapping[str, Callable[[object], dict[str, Weight] | None]]] = {
    "policy": _policy,
    "overlap_score_credit": _number,
    "overlap_score_credit_decay": _number,
    "prefill_load_scale": _number,
    "host_cache_hit_weight": _number,
    "disk_cache_hit_weight": _number,
    "temperature": _number,
    "track_prefill_tokens": _switch,
    "decode_load_scale": _number,
    "delay_scale": _number,
    "eviction_scale": _number,
    "expects_booked": _switch,
    "context_load_scale": _number,
    "pace_scale": _number,
    "interference_scale": _number,
    "slowness_scale": _number,
    "decode_active_request_weight": _number,
    # a request's override calls them so
    "router_temperature": _router_temperature,
    "overlap_score_weight": _overlap_score_weight,
}
"""By the names that the process's settings and a request's override have: each checks its value,
and returns the settings it means, None: that of its own name."""


def read_shadow_weights(members: Mapping[str, object]) -> dict[str, Weight]:
    """Return weights under the names that the process's settings have.

    Raises:
        ValueError: there is no such weight, it makes no sense, or two names say the same one.
    """
    weights: dict[str, Weight] = {}
    for name, value in members.items():
        reader = _READERS.get(name)
        if reader is None:
            known = ", ".join(_READERS)
            raise ValueError(f"{name[:64]!r} is no weight; there are {known}")
        try:
            meant = reader(value)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
        if meant is None:
            meant = {name: value if isinstance(value, bool) else float(value)}  # type: ignore[arg-type]
        for weight, one in meant.items():
            if weight in weights:
                raise ValueError(f"{name} says {weight} a second time")
            weights[weight] = one
    return weights


class ShadowWeights(Struct, frozen=True, kw_only=True):
    """Every weight that a set of them has."""

    overlap_score_credit: float
    overlap_score_credit_decay: float
    prefill_load_scale: float
    host_cache_hit_weight: float
    disk_cache_hit_weight: float
    temperature: float
    track_prefill_tokens: bool
    decode_load_scale: float
    delay_weight: float
    eviction_weight: float
    expects_booked: bool
    context_load_scale: float
    pace: float
    interference: float
    decode_active_request_weight: float
    slowness: float


class ShadowRegret(Struct, frozen=True, kw_only=True):
    """By how much one choice costs more than the other, in blocks, by the weights of one side.

    At temperature 0 never below 0.
    """

    total: float
    """Sum over the decisions, in blocks, e.g. `12.0`."""
    mean: float | None
    """Mean of the decisions, in blocks; null: none was scored, e.g. `0.1`."""
    counts: list[int]
    """Decisions by class of `regret_bounds`, and above the last, e.g. `[90, 10, 0]`."""


class ShadowMean(Struct, frozen=True, kw_only=True):
    """What the chosen rank meant for a request, on average, as the live weights predict it."""

    prefill_tokens: float
    """Tokens of the prompt to compute, e.g. `128.0`."""
    cached_tokens: float
    """Tokens of the prompt that the rank has cached, e.g. `384.0`."""
    queued_prefill_tokens: float
    """Tokens of other prompts before it, e.g. `2048.0`."""
    decode_blocks: float  # with the prompt's
    """KV blocks of the rank, with the prompt's, e.g. `96.0`."""


class ShadowChoices(Struct, frozen=True, kw_only=True):
    """Both sides' choices, and what the shadow's would save; negative: what they would cost."""

    live: ShadowMean
    """Choices of the weights in force."""
    shadow: ShadowMean
    """Choices of the shadow weights."""
    gain: ShadowMean
    """What the shadow's would save; negative: what they would cost."""


class ShadowNumbers(Struct, frozen=True, kw_only=True):
    """The results since these weights are in force as a shadow."""

    scored: int
    """Decisions that were scored, e.g. `100`."""
    agreed: int
    """Decisions in which both choose the same rank, e.g. `90`."""
    agreement: float | None
    """Share of those; null: nothing was scored, e.g. `0.9`."""
    skipped: dict[str, int]
    """Decisions that were not scored, by reason."""
    regret_by_live_weights: ShadowRegret  # of the shadow's choice
    """Regret of the shadow's choice, by the weights in force."""
    regret_by_shadow_weights: ShadowRegret
    """Regret of the live choice, by the shadow weights."""
    choices: ShadowChoices | None
    """Means of the choices; null: nothing was scored."""


class ShadowScope(Struct, frozen=True, kw_only=True):
    """The results of one model and tenant."""

    model_name: str
    tenant_id: str
    numbers: ShadowNumbers
    """The results."""


class ShadowStatus(Struct, frozen=True, kw_only=True):
    """GET /shadow."""

    enabled: bool
    """Whether there are shadow weights."""
    live_weights: ShadowWeights
    """Weights in force."""
    shadow_weights: ShadowWeights | None
    """Shadow weights; null: there are none."""
    sample: float | None = None
    """Share of the decisions that they score, e.g. `0.05`."""
    cost_max: float | None = None
    """Share of the time that scoring may take, e.g. `0.01`."""
    since_s: float | None = None
    """Seconds for which these weights have been looked at, e.g. `60.0`."""
    cost_s: float | UnsetType = UNSET
    """Seconds spent on it since the start, of the whole process, e.g. `0.2`."""
    regret_bounds: list[float] = field(default_factory=lambda: list(REGRET_BOUNDS))
    """Upper bounds of the classes of regret, in blocks, e.g. `[0.0, 1.0]`."""
    total: ShadowNumbers | None = None
    """The results of all scopes."""
    scopes: list[ShadowScope] = []
    """The results of the scopes that are listed."""
    scopes_total: int = 0
    """Number of scopes with results, e.g. `1`."""
