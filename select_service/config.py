"""Settings of the process: one table of flags, one of environment variables, and their reading.

Read by `cli.py` and by the edges, never by a core: what a core needs it is handed. A flag that
cannot be read ends the process (exit 2), an environment variable that cannot be read keeps its
default and leaves a warning (contract 9).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from indexer.types import EventLossPolicy
from select_service.types import RouterConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "ENVIRONMENT",
    "FLAGS",
    "FieldValidation",
    "Flag",
    "LogFormat",
    "PolicyFile",
    "RouterSettings",
    "Settings",
    "Variable",
    "read_environment",
]

LogFormat = Literal["json", "text"]
PORT_MAX: Final = 65535


class FieldValidation(Enum):
    """What happens to a top-level field nobody knows (D2)."""

    STRICT = "strict"  # 422
    WARN = "warn"  # accepted, with a Warning header
    IGNORE = "ignore"


# -- the environment ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """DYN_ROUTER_POLICY_CONFIG: its text, or why there is none. Parsed by the core."""

    path: str
    text: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """What the environment says."""

    config: RouterConfig
    policy: PolicyFile | None
    warnings: tuple[str, ...]  # to be logged once logging is set up


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable; `field` is what it sets in RouterConfig, None: nothing."""

    name: str
    field: str | None
    kind: Literal["float", "bool", "path", "none"]
    help: str


ENVIRONMENT: Final = (
    Variable(
        "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
        "overlap_score_credit",
        "float",
        "blocks taken off the cost per block cached on the device",
    ),
    Variable(
        "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
        "overlap_score_credit_decay",
        "float",
        "how fast that credit fades on ranks with more prefill load than the least loaded one",
    ),
    Variable(
        "DYN_ROUTER_PREFILL_LOAD_SCALE",
        "prefill_load_scale",
        "float",
        "weight of prefill blocks against decode blocks",
    ),
    Variable(
        "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
        None,
        "float",
        "deprecated: sets prefill_load_scale; 0 also sets the credit to 0",
    ),
    Variable(
        "DYN_OVERLAP_SCORE_WEIGHT",
        None,
        "float",
        "deprecated: the same",
    ),
    Variable(
        "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
        "host_cache_hit_weight",
        "float",
        "worth of a block in host memory, as a share of one on the device",
    ),
    Variable(
        "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
        "disk_cache_hit_weight",
        "float",
        "worth of a block on disk or external, as a share of one on the device",
    ),
    Variable(
        "DYN_ROUTER_TEMPERATURE",
        "temperature",
        "float",
        "0 picks the cheapest rank; above, cheaper ranks are merely likelier",
    ),
    Variable(
        "DYN_USE_KV_EVENTS",
        "use_kv_events",
        "bool",
        "false: workers need no kv_events endpoints, the index stays empty",
    ),
    Variable(
        "DYN_ROUTER_TRACK_PREFILL_TOKENS",
        "track_prefill_tokens",
        "bool",
        "whether reservations book prefill tokens, and costs count them",
    ),
    Variable(
        "DYN_ROUTER_QUEUE_THRESHOLD",
        "queue_threshold",
        "float",
        "a rank is busy above this multiple of its max_num_batched_tokens",
    ),
    Variable(
        "DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS",
        "overlap_refresh_after_s",
        "float",
        "a request that waited this long has its overlap read again",
    ),
    Variable(
        "DYN_ROUTER_POLICY_CONFIG",
        None,
        "path",
        "YAML file of queueing policy classes",
    ),
    Variable("DYN_ROUTER_TRACK_ACTIVE_BLOCKS", None, "none", "accepted; no effect"),
    Variable("DYN_ROUTER_TRACK_OUTPUT_BLOCKS", None, "none", "accepted; no effect"),
    Variable("DYN_ROUTER_REPLICA_SYNC", None, "none", "accepted; no effect"),
    Variable("DYN_ROUTER_PREDICTED_TTL_SECS", None, "none", "accepted; no effect"),
)

_OLD_WEIGHTS: Final = ("DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", "DYN_OVERLAP_SCORE_WEIGHT")
_BOOLEANS: Final = {
    "true": True,
    "1": True,
    "yes": True,
    "false": False,
    "0": False,
    "no": False,
}


def read_environment(environ: Mapping[str, str]) -> RouterSettings:
    """Read every variable of ENVIRONMENT; whatever is not understood leaves a warning."""
    warnings: list[str] = []
    read: dict[str, float | bool] = {}
    for variable in ENVIRONMENT:
        text = environ.get(variable.name)
        if text is None:
            continue
        if variable.kind == "none":
            warnings.append(f"{variable.name} has no effect on this service")
            continue
        parse = _PARSERS.get(variable.kind)
        if parse is None:
            continue
        value = parse(text)
        if value is None:
            warnings.append(f"{variable.name}={text[:64]!r} is not a {variable.kind}; ignored")
        else:
            read[variable.name] = value
    values = {
        variable.field: read[variable.name]
        for variable in ENVIRONMENT
        if variable.field is not None and variable.name in read
    }
    values = _old_weight(read, warnings) | values
    policy_path = environ.get("DYN_ROUTER_POLICY_CONFIG")
    return RouterSettings(
        # the table above is where names and types of these fields are tied together
        RouterConfig(**values),  # type: ignore[arg-type]
        _read_policy(policy_path) if policy_path else None,
        tuple(warnings),
    )


def _old_weight(read: Mapping[str, float | bool], warnings: list[str]) -> dict[str, float | bool]:
    """Translate the deprecated single weight; the variables that replaced it win."""
    for name in _OLD_WEIGHTS:
        if name in read:
            warnings.append(f"{name} is deprecated: use DYN_ROUTER_PREFILL_LOAD_SCALE")
            weight = read[name]
            credit = {} if weight else {"overlap_score_credit": 0.0}
            return {"prefill_load_scale": weight} | credit
    return {}


def _read_policy(path: str) -> PolicyFile:
    try:
        return PolicyFile(path, Path(path).read_text(encoding="utf-8"), None)
    except OSError as error:
        why = f"{error.strerror} (os error {error.errno})"
    except ValueError:  # UnicodeDecodeError, or a NUL in the path
        why = "stream did not contain valid UTF-8"
    return PolicyFile(path, None, f"failed to read router policy config {path}: {why}")


def _parse_float(text: str) -> float | None:
    try:
        value = float(text) if "_" not in text else math.nan
    except ValueError:
        return None
    return None if math.isnan(value) or math.isinf(value) else value


def _parse_bool(text: str) -> bool | None:
    return _BOOLEANS.get(text.strip().lower())


_PARSERS: Final[Mapping[str, Callable[[str], float | bool | None]]] = {
    "float": _parse_float,
    "bool": _parse_bool,
}


# -- the flags ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything the process is told at its start; the defaults are those of the flags."""

    host: str = "0.0.0.0"  # noqa: S104 - the contract's default; the README says how to narrow it
    port: int = 8092
    threads: int = 4
    field_validation: FieldValidation = FieldValidation.WARN
    on_event_loss: EventLossPolicy = EventLossPolicy.KEEP
    replica_sync_port: int | None = None
    reservation_ttl_s: float = 300.0
    kv_poll_interval_s: float = 10.0
    replay_timeout_s: float = 10.0
    max_body_bytes: int = 8 * 1024 * 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    keep_alive_timeout_s: int = 75
    connections_max: int = 8192
    shutdown_timeout_s: int = 5
    metrics_rank_series_max: int = 4096
    log_format: LogFormat = "text"
    log_level: str = "info"
    access_log: bool = False
    router: RouterSettings = RouterSettings(RouterConfig(), None, ())


@dataclass(frozen=True, slots=True)
class Flag:
    """One command-line flag; its default is that of the field of Settings with its name."""

    name: str  # as typed, "--port"
    parse: Callable[[str], object] | None  # None: a switch
    metavar: str
    help: str

    @property
    def field(self) -> str:
        """The field of Settings it sets."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def default(self) -> object:
        """What holds without the flag."""
        return getattr(Settings(), self.field)


def _whole(minimum: int, maximum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not minimum <= value <= maximum:
            raise ValueError(f"{value} is not in {minimum}..{maximum}")
        return value

    return parse


def _seconds(*, zero: bool) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = _parse_float(text)
        if value is None or value < 0 or (value == 0 and not zero):
            raise ValueError(f"{text!r} is not a number of seconds{'' if zero else ' above 0'}")
        return value

    return parse


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


_COUNT: Final = (1 << 31) - 1
FLAGS: Final = (
    Flag("--host", str, "ADDRESS", "address to listen on"),
    Flag("--port", _whole(0, PORT_MAX), "N", "port to listen on; 0 picks a free one"),
    Flag(
        "--threads",
        _whole(0, _COUNT),
        "N",
        "accepted for compatibility; no effect, one event loop serves everything",
    ),
    Flag(
        "--field-validation",
        FieldValidation,
        "strict|warn|ignore",
        "unknown top-level fields: refuse with 422, answer with a Warning header, say nothing",
    ),
    Flag(
        "--on-event-loss",
        EventLossPolicy,
        "keep|drop",
        "when lost KV events cannot be replayed: keep the rank's known blocks (and mark it"
        " uncertain), or drop them",
    ),
    Flag(
        "--replica-sync-port",
        _whole(1, PORT_MAX),
        "N",
        "publish bookings to replicas on this ZMQ port; without it nothing is published",
    ),
    Flag(
        "--reservation-ttl-s",
        _seconds(zero=True),
        "S",
        "a reservation ends this long after its last lifecycle call; 0 = never",
    ),
    Flag(
        "--kv-poll-interval-s",
        _seconds(zero=True),
        "S",
        "ask a silent worker's replay endpoint for missed KV events this often; 0 = never",
    ),
    Flag("--replay-timeout-s", _seconds(zero=False), "S", "deadline of one replay of KV events"),
    Flag(
        "--max-body-bytes",
        _whole(1, _COUNT),
        "N",
        "longest request body, 413 beyond",
    ),
    Flag(
        "--header-timeout-s",
        _seconds(zero=False),
        "S",
        "a connection that has not finished a request head by then is closed (408)",
    ),
    Flag(
        "--body-timeout-s",
        _seconds(zero=False),
        "S",
        "the same for a request body, and for a client that does not read its answer",
    ),
    Flag(
        "--keep-alive-timeout-s",
        _whole(1, _COUNT),
        "S",
        "an idle connection is closed after this long",
    ),
    Flag("--connections-max", _whole(1, _COUNT), "N", "open connections, 503 beyond"),
    Flag(
        "--shutdown-timeout-s",
        _whole(1, _COUNT),
        "S",
        "how long answers under way may take after SIGTERM or SIGINT",
    ),
    Flag(
        "--metrics-rank-series-max",
        _whole(0, _COUNT),
        "N",
        "ranks with series of their own in /metrics; the rest is only counted",
    ),
    Flag("--log-format", _choice("json", "text"), "json|text", "form of the log on stderr"),
    Flag(
        "--log-level",
        _choice("debug", "info", "warning", "error"),
        "debug|info|warning|error",
        "least important record to log",
    ),
    Flag("--access-log", None, "", "log every request"),
)
