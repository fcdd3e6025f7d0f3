"""The settings of a run, which are flags of `select-sim run` and `sweep`.

A field is a row as those of `select_service.settings.table`: its name in JSON, its flag, what it
accepts, its default and its meaning. A file of settings has the bounds of the command line.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec.structs import replace

from select_service.settings.row import ValueType, expect_values
from select_service.settings.value_types import (
    any_whole,
    between,
    choice,
    number,
    path,
    repeated,
    size,
    whole,
)
from select_service.simulator.core.baselines import BASELINES, IMPOSSIBLE
from select_service.simulator.core.baselines.dynamo_agentic import DYNAMO_AGENTIC
from select_service.simulator.core.engine_settings import KV_TOKENS, EngineSettings
from select_service.simulator.core.latency import AnalyticLatency, Latency
from select_service.simulator.core.routers import SIMPLE_ROUTERS, Counting
from select_service.simulator.core.workloads import KINDS, WorkloadSettings
from select_service.simulator.engine_presets import preset_of
from select_service.simulator.profiles import read_formula, read_profile
from select_service.simulator.traces import FORMATS, MOONCAKE_BLOCK, SPAN_MAX_S
from select_service.standard_output import meant
from select_service.types import KvEvents, RouterConfig
from select_service.types.admission import AdmissionSettings

T = TypeVar("T")
Settings = TypeVar("Settings", bound=msgspec.Struct)

FIRST_TOKEN: Final = "first-token"  # noqa: S105 - a policy
PEER: Final = "kv-cost"
DEFAULTS: Final[dict[str, RouterConfig]] = {
    FIRST_TOKEN: RouterConfig(policy="first-token"),
    PEER: RouterConfig(),
}
"""The policies of the core, with their weights where none are given."""

ROUTERS: Final[dict[str, type[Counting]]] = {
    kind.name: kind for kind in (*BASELINES, *SIMPLE_ROUTERS, *IMPOSSIBLE)
}
"""The policies that are not of the core, by the names they have of themselves."""

MEANINGS: Final = {
    FIRST_TOKEN: "when first tokens come, also those of requests behind",
    PEER: "blocks to compute and in use; the service's default",
    DYNAMO_AGENTIC: "kv-cost with the weights of Dynamo's agentic preset",
    **{name: kind.meaning for name, kind in ROUTERS.items()},
}
"""What each policy decides by, by its name."""

POLICIES: Final = tuple(MEANINGS)
"""Of the first two, the one that `weights` name has these weights, and the admission control and
the sessions of the settings; the other has its defaults."""

WORKERS_MAX: Final = 10_000
"""Per run: ten thousand take minutes before the first request, and exceed what a service is for."""

REPLICAS_MAX: Final = 64
"""Each learns all bookings of the others."""

DELAY_MAX_S: Final = 86_400.0
"""For every delay: a run ends when the last delayed event has happened."""


# -- what consists of several values -------------------------------------------------------------


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines of a run.

    `profile` is a directory of the planner's profiles, and `preset` the name of a model on a
    device, instead of times.
    """

    kv_tokens: int | None = None  # None: as the profile says, else `KV_TOKENS`
    step_tokens_max: int = 8_192
    sequences_max: int = 256
    base_s: float = 6e-3
    prefill_token_s: float = 30e-6
    prefill_pair_s: float = 2e-10
    sequence_s: float = 0.1e-3
    kv_token_s: float = 75e-9
    host_tokens: int = 0  # of KV cache below the device's, and the seconds to load one
    host_token_s: float = 3e-6
    disk_tokens: int = 0
    disk_token_s: float = 20e-6
    profile: str | None = None
    preset: str | None = None

    def build(self) -> EngineSettings:
        """Return the settings of a simulated engine.

        Raises:
            ValueError: an engine cannot compute with them.
            OSError: the profile cannot be read.
        """
        latency: Latency
        kv_tokens = KV_TOKENS
        self._expect_times_once()
        if self.preset is not None:
            return self._with(preset_of(self.preset)).build()
        formula = None if self.profile is None else read_formula(Path(self.profile))
        if formula is not None:
            return self._with(formula).build()
        if self.profile is None:
            latency = AnalyticLatency(*(getattr(self, name) for name in _TIMES))
        else:
            latency = measured = read_profile(Path(self.profile))
            kv_tokens = int(measured.max_kv_tokens)
        if self.kv_tokens is not None:
            kv_tokens = self.kv_tokens
        others = {name: getattr(self, name) for name in _LIMITS}
        settings = EngineSettings(latency, kv_tokens, **others)
        settings.check()
        return settings

    def _expect_times_once(self) -> None:
        usual = EngineSpec()
        has_own = any(getattr(self, name) != getattr(usual, name) for name in _TIMES)
        if (self.preset is not None) + (self.profile is not None) + has_own > 1:
            raise ValueError("a preset or a profile has its own times: not both, and none beside")

    def _with(self, values: Mapping[str, Any]) -> "EngineSpec":
        """Return it with these times, and with their KV capacity unless another is given."""
        own = {} if self.kv_tokens is None else {"kv_tokens": self.kv_tokens}
        return changed(replace(self, preset=None, profile=None), {**values, **own})


_TIMES: Final = AnalyticLatency.__slots__
_LIMITS: Final = tuple(set(EngineSettings.__slots__) - {"latency", "kv_tokens"})
_ENGINE: Final = EngineSpec.__struct_fields__


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recorded requests, `speed` times as fast as they came."""

    path: Annotated[str, path("FILE").called("--trace").common(), "file of recorded requests"]
    format: Annotated[str, choice(*FORMATS).common(), "format of the trace"] = "mooncake"
    speed: Annotated[
        float, between(0.0, math.inf), "play the trace so many times as fast as it came"
    ] = 1.0
    jitter_s: Annotated[
        float,
        number(0.0, SPAN_MAX_S, "S").called("--jitter"),
        "each request comes up to so many seconds later, before --speed",
    ] = 0.0
    limit: Annotated[int, size(0), "requests of the trace to play; 0: all"] = 0
    users: Annotated[
        int,
        size(0),
        "users that play the trace in a closed loop, each asking when the last answer has ended, "
        "instead of its times; 0: none",
    ] = 0
    block_size: Annotated[
        int,
        size().called("--trace-block-size"),
        "tokens that a hash id of Mooncake's format stands for",
    ] = MOONCAKE_BLOCK

    def check(self) -> None:
        """Refuse settings that cannot be read.

        Raises:
            ValueError: naming it.
        """
        expect_values(self)
        if self.users and (self.speed != 1.0 or self.jitter_s):
            raise ValueError("users of a trace set its pace: no speed and no jitter_s")
        if self.block_size != MOONCAKE_BLOCK and self.format != "mooncake":
            raise ValueError(f"block_size of a trace is of the format mooncake, not {self.format}")


class FleetChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scheduled change of the fleet; the oldest worker of the pool goes."""

    at: Annotated[float, number(0.0, metavar="S"), "seconds from the start"]
    do: Literal["add", "remove", "fail"]
    count: Annotated[int, whole(1, WORKERS_MAX), "workers"] = 1
    pool: str = ""
    # of added workers; for failed ones: until a replacement, 0: none
    startup_s: Annotated[float, number(0.0, metavar="S"), "until it serves"] = 0.0


class Slow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Makes this many workers slower: they have the common engine at a fraction of its speed."""

    count: Annotated[int, whole(1, WORKERS_MAX), "workers"]
    speed: Annotated[float, between(0.0, math.inf), "of the others' speed"]


# -- how their text is read ----------------------------------------------------------------------


def pairs_of(text: str) -> dict[str, str]:
    """Parse NAME=VALUE,...

    Raises:
        ValueError: it has another form.
    """
    pairs: dict[str, str] = {}
    for piece in filter(None, text.split(",")):
        name, equals, value = piece.partition("=")
        if not equals:
            raise ValueError(f"{piece} should be NAME=VALUE")
        pairs[name.strip()] = value.strip()
    return pairs


def weights_with(base: RouterConfig, values: Mapping[str, object]) -> RouterConfig:
    """Return weights with some of them changed.

    Raises:
        ValueError: a name is unknown, or its value invalid.
    """
    weights = changed(base, values)
    expect_weights(weights)
    return weights


def expect_weights(weights: RouterConfig) -> None:
    """Refuse weights that the server would refuse.

    Raises:
        ValueError: naming the first of them.
    """
    for name in weights.__struct_fields__:
        value = getattr(weights, name)
        if isinstance(value, float) and not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be a number at least 0")


def changed(base: Settings, values: Mapping[str, object]) -> Settings:
    """Return the same with some members changed.

    Raises:
        ValueError: there is no such member, or its value is invalid.
    """
    kind = type(base)
    _expect_known(values, kind)
    merged = {name: getattr(base, name) for name in kind.__struct_fields__} | dict(values)
    return _as(kind, merged)


def _as(kind: type[T], values: object) -> T:
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(_with_choices(str(error), kind)) from None


def _with_choices(text: str, kind: type) -> str:
    """Say which member msgspec means, and the names that it takes where another is none of them."""
    problem, _, member = text.partition(" - at `$.")
    member = member.rstrip("`")
    choices = get_args(get_type_hints(kind).get(member)) if "enum value" in text else ()
    if choices:
        wrong = problem.partition("'")[2].rstrip("'")
        names = list(map(str, choices))
        return f"{member}: {wrong!r} is none of {', '.join(names)}{meant(wrong, names)}"
    return f"{member}: {problem}" if member else text


def _expect_known(values: Mapping[str, object], kind: type[msgspec.Struct]) -> None:
    unknown = values.keys() - set(kind.__struct_fields__)
    if unknown:
        known = ", ".join(kind.__struct_fields__)
        near = meant(min(unknown), kind.__struct_fields__)
        raise ValueError(f"there is no {', '.join(sorted(unknown))}{near}; there are {known}")


def decoded(text: bytes, kind: type[T]) -> T:
    """Decode JSON.

    Raises:
        ValueError: it is malformed, or not of this kind.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None


PAIRS: Final = ValueType(pairs_of, "NAME=VALUE,...")


def _admission(text: str) -> AdmissionSettings:
    _expect_known(decoded(text.encode(), dict[str, Any]), AdmissionSettings)
    return decoded(text.encode(), AdmissionSettings)


_OPEN_LOOP: Final = frozenset({"rate", "diurnal_period_s", "diurnal_depth"})
_OF_ARRIVALS: Final = {
    "poisson": _OPEN_LOOP,
    "gamma": _OPEN_LOOP | {"cv"},
    "bursts": _OPEN_LOOP | {"burst_size"},
    "closed": frozenset({"users"}),
}
_OF_ANY_ARRIVALS: Final = frozenset().union(*_OF_ARRIVALS.values())
_OF_SESSIONS: Final = _OF_ANY_ARRIVALS | {"arrivals", "turns"}


def _workload(text: str) -> WorkloadSettings:
    kind, _, rest = text.partition(",")
    pairs = pairs_of(rest)
    workload = changed(WorkloadSettings(), {"kind": kind, **pairs})
    left_aside = _OF_SESSIONS if workload.kind == "rl" else {"samples"}
    for name in filter(left_aside.__contains__, pairs):
        raise ValueError(f"{kind} takes no {name}")
    for name in filter((_OF_ANY_ARRIVALS - _OF_ARRIVALS[workload.arrivals]).__contains__, pairs):
        raise ValueError(f"{workload.arrivals} arrivals take no {name}")
    return workload


def _pieces(kind: type[Settings], form: str, required: int) -> Callable[[str], Settings]:
    """Return a parser of the first fields of a kind, with colons between them."""

    def parse(text: str) -> Settings:
        pieces = text.split(":")
        names = form.lower().replace("[:", ":").replace("]", "").split(":")
        if not required <= len(pieces) <= len(names):
            raise ValueError(f"{text} should be {form}")
        try:
            made = _as(kind, dict(zip(names, pieces, strict=False)))
            expect_values(made)
        except ValueError as error:
            raise ValueError(f"{text}: {error}") from None
        return made

    return parse


_CHANGE: Final = "AT:DO[:COUNT[:STARTUP_S]]"
_SLOW: Final = "COUNT:SPEED"
_DELAY: Final = number(0.0, DELAY_MAX_S, "S")


# -- a run ---------------------------------------------------------------------------------------


class SimulationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings that determine a run."""

    policy: str = FIRST_TOKEN
    trace: Trace | None = None
    workloads: Annotated[
        list[WorkloadSettings],
        repeated(ValueType(_workload, "KIND[,NAME=VALUE...]")).called("--workload").common(),
        f"synthetic requests ({', '.join(KINDS)}); repeatable; "
        "e.g. chat,rate=2,requests=5000,tenant=a: two chats of several turns begin a second",
    ] = []
    workers: Annotated[int, whole(1, WORKERS_MAX).common(), "number of simulated workers"] = 8
    prefill_workers: Annotated[
        int,
        whole(0, WORKERS_MAX),
        "workers that only compute prompts, beside those of --workers, which then decode",
    ] = 0
    engine: Annotated[
        EngineSpec, PAIRS, f"what differs in the engines, of {', '.join(_ENGINE)}"
    ] = EngineSpec()
    # the last of `workers`; their pools are slow-1, slow-2, ...
    slow: Annotated[
        list[Slow],
        repeated(ValueType(_pieces(Slow, _SLOW, 2), _SLOW)),
        "so many of the workers are slower, e.g. 4:0.5 four at half the speed of the others",
    ] = []
    block_size: Annotated[int, size().common(), "tokens of a KV block"] = 512
    changes: Annotated[
        list[FleetChange],
        repeated(ValueType(_pieces(FleetChange, _CHANGE, 2), _CHANGE)).called("--change"),
        "add, remove or fail workers on the way, e.g. 60:fail:1:30 one after 60 s, for 30 s",
    ] = []
    weights: Annotated[
        RouterConfig,
        PAIRS,
        "weights of first-token, e.g. prefill_load_scale=2, or with policy=kv-cost of kv-cost; "
        "off: the defaults of each",
    ] = DEFAULTS[FIRST_TOKEN]
    admission: Annotated[
        AdmissionSettings | None,
        ValueType(_admission, "JSON"),
        "admission control of the policy with --weights",
    ] = None
    session_ttl_s: Annotated[
        float,
        number(0.0, metavar="S").called("--session-ttl"),
        "seconds that sessions keep their worker, under the policy with --weights; 0: they do not",
    ] = 0.0
    replicas: Annotated[
        int, whole(1, REPLICAS_MAX), "replicas of the service that decide in turn"
    ] = 1
    sync_delay_s: Annotated[
        float,
        _DELAY.called("--sync-delay"),
        "seconds until a replica learns what another has reserved",
    ] = 0.005
    kv_events: Annotated[
        KvEvents,
        choice("engine", "predicted", "none"),
        "where blocks are known from: KV events, an estimate of what routing put there, or nowhere",
    ] = "engine"
    event_lag_s: Annotated[float, _DELAY.called("--event-lag"), "seconds that KV events take"] = (
        0.01
    )
    load_lag_s: Annotated[
        float, _DELAY.called("--load-lag"), "seconds that lifecycle calls take"
    ] = 0.001
    transfer_token_s: Annotated[
        float,
        _DELAY.called("--transfer-token"),
        "seconds to move a token's KV blocks to another worker",
    ] = 1e-6
    detect_s: Annotated[
        float, _DELAY.called("--detect"), "seconds until a failed worker is noticed"
    ] = 1.0
    slo_ttft_s: Annotated[
        float | None,
        between(0.0, math.inf, "S").called("--slo-ttft").common(),
        "target for first tokens; a request's own comes first",
    ] = None
    slo_itl_s: Annotated[
        float | None,
        between(0.0, math.inf, "S").called("--slo-itl").common(),
        "target for the mean seconds between two tokens",
    ] = None
    seed: Annotated[int, any_whole(), "seed of the first run"] = 1
    check: bool = True  # assert conservation at the end

    def validate(self) -> None:
        """Refuse settings that cannot be run.

        Raises:
            ValueError: naming it.
        """
        if self.policy not in POLICIES:
            near = meant(self.policy, POLICIES)
            raise ValueError(f"policy {self.policy!r} is none of {', '.join(POLICIES)}{near}")
        if (self.trace is None) == (not self.workloads):
            raise ValueError(
                "a trace or workloads, one of them: --trace FILE or --workload chat,requests=500"
            )
        expect_values(self)
        expect_weights(self.weights)
        for part in (*self.slow, *self.changes):
            expect_values(part)
        if sum(slow.count for slow in self.slow) > self.workers:
            raise ValueError(f"more slow workers than the {self.workers} there are")
        if self.workers + self.prefill_workers > WORKERS_MAX:
            raise ValueError(f"there may be {WORKERS_MAX:,} workers at most")
        if self.trace is not None:
            self.trace.check()
        for one in self.workloads:
            one.check()


def peer_of(settings: SimulationSettings) -> SimulationSettings:
    """Return the same with the formula of the contract, its defaults, and nothing around them."""
    return replace(settings, policy=PEER, weights=DEFAULTS[PEER], admission=None, session_ttl_s=0.0)
