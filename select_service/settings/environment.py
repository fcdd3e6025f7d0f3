"""The DYN_* variables of the reference that are no flags: a table of them, and their parsing.

The variable of a flag stands in its row (`table/`). `service_settings.py` carries the result; the
core parses the text of the policy file.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

from select_service.types import RouterConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class PolicyFile(Struct, frozen=True):
    """DYN_ROUTER_POLICY_CONFIG: its text, or why there is none. The core parses it."""

    path: str
    text: str | None
    error: str | None


class RouterSettings(Struct, frozen=True):
    """The settings from the environment."""

    config: RouterConfig
    policy: PolicyFile | None
    warnings: tuple[str, ...]  # to be logged once logging is set up


class Variable(Struct, frozen=True):
    """One environment variable; `field` is the field of RouterConfig it sets, None: none."""

    name: str
    field: str | None
    kind: Literal["float", "bound", "bool", "path", "none"]  # a bound may be infinite
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
        "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
        "decode_active_request_weight",
        "float",
        "blocks that each request of a rank adds to its cost",
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
        "DYN_ROUTER_ASSUME_KV_REUSE",
        "assume_kv_reuse",
        "bool",
        "false: a prompt in tokens is booked with blocks of its own, shared with none",
    ),
    Variable(
        "DYN_ROUTER_QUEUE_THRESHOLD",
        "queue_threshold",
        "bound",
        "a rank is busy above this multiple of its max_num_batched_tokens; inf: no request waits",
    ),
    Variable(
        "DYN_ROUTER_POLICY_CONFIG",
        None,
        "path",
        "YAML file of queueing policy classes",
    ),
    Variable(
        "DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS",
        None,
        "none",
        "accepted; no effect: overlap is always read anew when a waiting request is admitted",
    ),
    Variable("DYN_ROUTER_TRACK_ACTIVE_BLOCKS", None, "none", "accepted; no effect"),
    Variable("DYN_ROUTER_TRACK_OUTPUT_BLOCKS", None, "none", "accepted; no effect"),
    Variable("DYN_ROUTER_REPLICA_SYNC", None, "none", "accepted; no effect"),
    Variable("DYN_ROUTER_PREDICTED_TTL_SECS", None, "none", "accepted; no effect"),
)

_OLD_WEIGHTS: Final = ("DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", "DYN_OVERLAP_SCORE_WEIGHT")
_KINDS: Final = {"float": "float", "bound": "float", "bool": "bool"}  # in words
_BOOLEANS: Final = {
    "true": True,
    "1": True,
    "yes": True,
    "false": False,
    "0": False,
    "no": False,
}


def read_environment(environ: Mapping[str, str]) -> RouterSettings:
    """Read all variables of ENVIRONMENT; an invalid value leaves a warning."""
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
            warnings.append(
                f"{variable.name}={text[:64]!r} is not a {_KINDS[variable.kind]}; ignored"
            )
        else:
            read[variable.name] = value
    values = {
        variable.field: read[variable.name]
        for variable in ENVIRONMENT
        if variable.field is not None and variable.name in read
    }
    values |= _old_weight(read, warnings)
    policy_path = environ.get("DYN_ROUTER_POLICY_CONFIG")
    return RouterSettings(
        # ENVIRONMENT ties the names and types of these fields together.
        RouterConfig(**values),  # type: ignore[arg-type]
        _read_policy(policy_path) if policy_path else None,
        tuple(warnings),
    )


def _old_weight(read: Mapping[str, float | bool], warnings: list[str]) -> dict[str, float | bool]:
    """Translate the deprecated single weight; it overrides its replacements, as in 1.3.1."""
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


def parse_float(text: str) -> float | None:
    """Read a finite number, or None."""
    value = _parse_bound(text)
    return None if value is None or math.isinf(value) else value


def _parse_bound(text: str) -> float | None:
    """Read a number that may be infinite, or None."""
    try:
        value = float(text) if "_" not in text else math.nan
    except ValueError:
        return None
    return None if math.isnan(value) else value


def _parse_bool(text: str) -> bool | None:
    return _BOOLEANS.get(text.strip().lower())


_PARSERS: Final[Mapping[str, Callable[[str], float | bool | None]]] = {
    "float": parse_float,
    "bound": _parse_bound,
    "bool": _parse_bool,
}
