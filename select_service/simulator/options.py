"""The options shared by `select-sim run` and `sweep`, and the run settings they describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from select_service.simulator.core.workloads import KINDS, WorkloadSettings
from select_service.simulator.runs import (
    FleetChange,
    SimulationSettings,
    Slow,
    Trace,
    expect_weights,
)
from select_service.simulator.traces import MOONCAKE_BLOCK, READERS
from select_service.types import RouterConfig
from select_service.types.admission import AdmissionSettings

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Mapping

__all__ = ["add_options", "pairs_of", "settings_of", "weights_with"]

T = TypeVar("T")
Told = TypeVar("Told", bound=msgspec.Struct)

SEEDS_MAX: Final = 10_000
"""Runs of each policy: intervals would not get visibly narrower."""


def add_options(parser: ArgumentParser) -> None:
    """Add the options that determine a run."""
    what = parser.add_argument_group("requests (a trace, or workloads side by side)")
    what.add_argument("--trace", metavar="FILE", help="recorded requests")
    what.add_argument("--format", default="mooncake", choices=sorted(READERS), help="of the trace")
    what.add_argument(
        "--trace-block-size",
        type=int,
        default=MOONCAKE_BLOCK,
        metavar="N",
        help="tokens that a hash id of Mooncake's format stands for (%(default)s)",
    )
    what.add_argument("--limit", type=int, default=0, help="so many requests of it")
    what.add_argument(
        "--jitter", type=float, default=0.0, metavar="S", help="each comes up to so much later"
    )
    speed = what.add_mutually_exclusive_group()
    speed.add_argument("--speed", type=float, default=1.0, help="so many times as fast as it came")
    speed.add_argument("--load", type=float, help="as fast as makes this share of capacity")
    what.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="KIND[,NAME=VALUE...]",
        help=f"synthetic requests: {', '.join(KINDS)}; e.g. chat,rate=2,requests=5000,tenant=a",
    )
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--workers", type=int, help="how many (8)")
    fleet.add_argument("--prefill-workers", type=int, help="for prompts only; the others decode")
    fleet.add_argument(
        "--engine", default="", metavar="NAME=VALUE,...", help="kv_tokens, base_s, profile, ..."
    )
    fleet.add_argument(
        "--slow",
        action="append",
        default=[],
        metavar="COUNT:SPEED",
        help="so many of the workers are slower; 4:0.5 at half the speed of the others",
    )
    fleet.add_argument("--block-size", type=int, help="tokens (512)")
    fleet.add_argument(
        "--change",
        action="append",
        default=[],
        metavar="AT:DO[:COUNT[:STARTUP_S]]",
        help="add, remove or fail workers on the way; 60:fail:1:30 brings it back after 30 s",
    )
    service = parser.add_argument_group("service")
    service.add_argument(
        "--weights",
        default="",
        metavar="NAME=VALUE,...",
        help="of `ours`, e.g. overlap_score_credit",
    )
    service.add_argument("--admission", metavar="JSON", help="who is let in, by `ours`")
    service.add_argument(
        "--session-ttl", type=float, metavar="S", help="sessions keep their worker, in `ours` (0)"
    )
    service.add_argument("--replicas", type=int, help="of the service (1)")
    service.add_argument("--sync-delay", type=float, metavar="S", help="between them (0.005)")
    service.add_argument("--event-lag", type=float, metavar="S", help="of KV events (0.01)")
    service.add_argument("--load-lag", type=float, metavar="S", help="of lifecycle calls (0.001)")
    how = parser.add_argument_group("runs")
    how.add_argument("--settings", metavar="FILE", help="JSON as in results; options come on top")
    how.add_argument("--seed", type=int, help="of the first run (1)")
    how.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each policy")
    how.add_argument("--jobs", type=int, default=1, metavar="N", help="processes side by side")
    how.add_argument("--out", metavar="FILE", help="results as JSON")
    how.add_argument("--quiet", action="store_true", help="no progress bar")


def settings_of(args: Namespace) -> SimulationSettings:
    """Return the validated run settings, without a policy.

    Raises:
        ValueError: naming what is wrong.
        OSError: the settings' file cannot be read.
    """
    base = SimulationSettings()
    if args.settings is not None:
        base = _decoded(Path(args.settings).read_bytes(), SimulationSettings, args.settings)
    given: dict[str, Any] = {
        "workers": args.workers,
        "prefill_workers": args.prefill_workers,
        "block_size": args.block_size,
        "session_ttl_s": args.session_ttl,
        "replicas": args.replicas,
        "sync_delay_s": args.sync_delay,
        "event_lag_s": args.event_lag,
        "load_lag_s": args.load_lag,
        "seed": args.seed,
    }
    if args.trace is not None:
        given["trace"] = _trace(args)
    if args.workload:
        given["workloads"] = [_workload(text) for text in args.workload]
    if args.engine:
        given["engine"] = _changed(base.engine, args.engine, "--engine")
    if args.weights:
        given["weights"] = _changed(base.weights, args.weights, "--weights")
    if args.admission is not None:
        given["admission"] = _admission(args.admission)
    if args.change:
        given["changes"] = [_change(text) for text in args.change]
    if args.slow:
        given["slow"] = [_slow(text) for text in args.slow]
    _expect_runs(args)
    _expect_used(args)
    settings = replace(base, **{name: one for name, one in given.items() if one is not None})
    settings.validate()
    return settings


def _trace(args: Namespace) -> Trace:
    return Trace(
        path=args.trace,
        format=args.format,
        speed=args.speed,
        jitter_s=args.jitter,
        limit=args.limit,
        block_size=args.trace_block_size,
    )


def _expect_runs(args: Namespace) -> None:
    for name in ("seeds", "jobs"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1")
    if args.seeds > SEEDS_MAX:
        raise ValueError(f"--seeds must be at most {SEEDS_MAX:,}")


def _admission(text: str) -> AdmissionSettings:
    members = _decoded(text.encode(), dict[str, Any], "--admission")
    _expect_known(members, AdmissionSettings, "--admission")
    return _decoded(text.encode(), AdmissionSettings, "--admission")


def _expect_known(values: dict[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    unknown = values.keys() - set(kind.__struct_fields__)
    if unknown:
        raise ValueError(f"{where}: there is no {', '.join(sorted(unknown))}")


def _decoded(text: bytes, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: {error}") from None


def _expect_used(args: Namespace) -> None:
    """Refuse options of a trace without one: they would be ignored silently."""
    if args.trace is not None:
        return
    given = {
        "--format": args.format != "mooncake",
        "--trace-block-size": args.trace_block_size != MOONCAKE_BLOCK,
        "--limit": args.limit,
        "--jitter": args.jitter,
        "--speed": args.speed != 1.0,
    }
    for name in filter(given.get, given):
        raise ValueError(f"{name} is of a --trace")


def weights_with(base: RouterConfig, values: Mapping[str, object]) -> RouterConfig:
    """Return weights with some of them changed.

    Raises:
        ValueError: a name is unknown, or its value invalid.
    """
    changed = _converted(base, dict(values), "weights")
    expect_weights(changed)
    return changed


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
    pairs = pairs_of(rest, "--workload")
    told = _converted(WorkloadSettings(), {"kind": kind, **pairs}, "--workload")
    left_aside = _OF_SESSIONS if told.kind == "rl" else {"samples"}
    for name in filter(left_aside.__contains__, pairs):
        raise ValueError(f"--workload: {kind} takes no {name}")
    for name in filter((_OF_ANY_ARRIVALS - _OF_ARRIVALS[told.arrivals]).__contains__, pairs):
        raise ValueError(f"--workload: {told.arrivals} arrivals take no {name}")
    return told


def _changed(base: Told, text: str, where: str) -> Told:
    return _converted(base, pairs_of(text, where), where)


def pairs_of(text: str, where: str) -> dict[str, Any]:
    """Parse NAME=VALUE,...

    Raises:
        ValueError: it has another form.
    """
    pairs: dict[str, Any] = {}
    for piece in filter(None, text.split(",")):
        name, equals, value = piece.partition("=")
        if not equals:
            raise ValueError(f"{where}: {piece} should be NAME=VALUE")
        pairs[name.strip()] = value.strip()
    return pairs


def _converted(base: Told, values: dict[str, Any], where: str) -> Told:
    kind = type(base)
    _expect_known(values, kind, where)
    merged = {name: getattr(base, name) for name in kind.__struct_fields__} | values
    try:
        return msgspec.convert(merged, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None


def _change(text: str) -> FleetChange:
    pieces = text.split(":")
    names = ("at", "do", "count", "startup_s")
    if not 2 <= len(pieces) <= len(names):  # noqa: PLR2004 - a time and what to do
        raise ValueError(f"--change: {text} should be AT:DO[:COUNT[:STARTUP_S]]")
    try:
        return msgspec.convert(dict(zip(names, pieces, strict=False)), FleetChange, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"--change {text}: {error}") from None


def _slow(text: str) -> Slow:
    pieces = text.split(":")
    names = ("count", "speed")
    if len(pieces) != len(names):
        raise ValueError(f"--slow: {text} should be COUNT:SPEED")
    try:
        return msgspec.convert(dict(zip(names, pieces, strict=True)), Slow, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"--slow {text}: {error}") from None
