"""The options of each command of `select-sim`: a class per command, a row per flag."""

from argparse import Namespace
from math import inf
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec.structs import replace

from select_service.core.admission.policies import KEYS, KEYS_OF_ALL, MEANINGS, NAMES
from select_service.settings.command_line import add_flags
from select_service.settings.row import flags_of
from select_service.settings.value_types import (
    between,
    choice,
    count,
    path,
    repeated,
    size,
    switch,
    text,
    whole,
)
from select_service.simulator.settings import (
    FIRST_TOKEN,
    PAIRS,
    PEER,
    POLICIES,
    SimulationSettings,
    Trace,
    changed,
    decoded,
)
from select_service.simulator.settings import MEANINGS as POLICY_MEANINGS
from select_service.standard_output import CommandParser, definitions

SEEDS_MAX: Final = 10_000
"""Runs of each policy: intervals would not get visibly narrower."""


class RunsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How runs are carried out, and where results go."""

    settings: Annotated[
        str | None, path("FILE"), "settings as JSON, as results have them; flags come on top"
    ] = None
    seeds: Annotated[
        int, whole(1, SEEDS_MAX).common(), "runs of each policy, each with its seed"
    ] = 1
    jobs: Annotated[int, count(), "processes that run side by side"] = 1
    out: Annotated[str | None, path("FILE").common(), "file for the results, as JSON"] = None
    report: Annotated[
        str | None, path("FILE").common(), "file for the results, as one HTML page with plots"
    ] = None
    quiet: Annotated[bool, switch(), "show no progress bar"] = False


class LoadedOptions(RunsOptions, frozen=True, kw_only=True):
    """How fast a trace comes."""

    load: Annotated[
        float | None,
        between(0.0, inf, "SHARE"),
        "the trace comes as fast as takes this share of the fleet's capacity, instead of --speed",
    ] = None


_POLICIES = Annotated[
    str,
    text("NAME,...").common(),
    f"all, or some of {', '.join(POLICIES)}; the service's default is {PEER}; "
    "--help-all says what each decides by",
]


class RunOptions(LoadedOptions, frozen=True, kw_only=True):
    """What `run` compares."""

    policy: _POLICIES = f"{FIRST_TOKEN},{PEER}"


class CapacityOptions(RunsOptions, frozen=True, kw_only=True):
    """What `capacity` looks for, and for which policies."""

    policy: _POLICIES = f"{FIRST_TOKEN},{PEER}"
    find: Annotated[
        str,
        choice("load", "workers").common(),
        "the highest load within the targets, or the fewest workers",
    ] = "load"
    share: Annotated[float, between(0.0, 1.0, "SHARE"), "of the requests that must be in time"] = (
        0.9
    )
    tolerance: Annotated[
        float, between(0.0, 1.0, "SHARE"), "how far from each other the last two loads may be"
    ] = 0.01


class SweepOptions(LoadedOptions, frozen=True, kw_only=True):
    """What `sweep` varies."""

    vary: Annotated[
        tuple[str, ...],
        repeated(text("WEIGHT=VALUES")),
        "a weight and its values, as 0,0.5,1 or begin:end:step; repeat the flag for a grid",
    ]
    draw: Annotated[
        int | None, size(0).common(), "run so many points of the grid, drawn at random"
    ] = None
    aims: Annotated[
        str, text("NAME,...").common(), "the measures that count, by their names in results"
    ] = "ttft_p90,itl_p90,load_cov"
    seeds: Annotated[int, whole(1, SEEDS_MAX).common(), "runs of each point of the grid"] = 3
    jobs: Annotated[
        int, count(0).common(), "processes that run side by side; 0: one per processor"
    ] = 0


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a recording that `replay` makes again."""

    weights: Annotated[
        dict[str, str],
        PAIRS,
        "weights to try instead, e.g. overlap_score_credit=0.5,temperature=0; overrides of "
        "requests stay",
    ] = {}
    model_name: Annotated[str | None, text("NAME"), "only decisions about this model"] = None
    tenant_id: Annotated[str | None, text("NAME"), "only decisions about this tenant"] = None
    examples: Annotated[int, count(0), "changed decisions to show"] = 10
    json: Annotated[bool, switch(), "print the result as JSON"] = False
    out: Annotated[str | None, path("FILE"), "file for the result, as JSON"] = None
    report: Annotated[
        str | None, path("FILE"), "file for the result, as one HTML page with plots"
    ] = None
    quiet: Annotated[bool, switch(), "show no progress bar"] = False


class CalibrateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `calibrate` writes out of measurements."""

    kv_tokens: Annotated[
        int,
        size().common(),
        "tokens of the engine's KV cache, as it logs when it starts (vLLM: GPU KV cache size)",
    ]
    out: Annotated[str, path("DIR").common(), "directory for the profile"]


class AdmitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which policy `admit` asks about the arrivals."""

    policy: Annotated[
        str, choice(*NAMES, metavar="NAME"), f"admission policy that decides: {', '.join(NAMES)}"
    ]
    config: Annotated[
        str,
        text("JSON"),
        "JSON object of those keys of the policy that differ from their defaults, e.g. "
        '{"capacity": 100, "refill_rate": 10} for token-bucket; deploy/docs/admission.md has the '
        "defaults",
    ] = "{}"
    json: Annotated[
        bool, switch(), "print JSON lines: the only format there is, and the default"
    ] = False


class QueueOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The queue that `queue` carries operations out on."""

    config: Annotated[
        str,
        text("JSON"),
        'settings of the queue, e.g. {"max_depth": 100, "fairness": "round-robin"}; '
        "deploy/docs/admission.md lists them",
    ] = "{}"


TRACE: Final = tuple(
    replace(flag, default=None) if flag.is_required else flag for flag in flags_of(Trace)
)
"""Not required: workloads come without one."""
SIMULATION: Final = flags_of(SimulationSettings)
SECTIONS: Final = {
    "run": (*flags_of(RunOptions, inherited=True), *TRACE, *SIMULATION),
    "sweep": (*flags_of(SweepOptions, inherited=True), *TRACE, *SIMULATION),
    "capacity": (*flags_of(CapacityOptions, inherited=True), *TRACE, *SIMULATION),
    "replay": flags_of(ReplayOptions),
    "calibrate": flags_of(CalibrateOptions),
    "admit": flags_of(AdmitOptions),
    "queue": flags_of(QueueOptions),
}
"""The rows by command, in the order of the reference."""

_OF_TRACE: Final = "trace."


def admission_policies() -> str:
    """Return what each admission policy does, and the keys of its configuration."""
    texts = {
        name: f"{meaning}{_keys('; keys: ', KEYS[name])}" for name, meaning in MEANINGS.items()
    }
    return definitions("policies", {**texts, "all": _keys("keys: ", KEYS_OF_ALL)})


def _keys(begin: str, keys: frozenset[str]) -> str:
    return begin + ", ".join(sorted(keys)) if keys else ""


def add_options(parser: CommandParser, options: type[RunsOptions]) -> None:
    """Add the flags of a command that makes runs."""
    names_policies = "policy" in options.__struct_fields__
    parser.list_seldom_used(definitions("policies", POLICY_MEANINGS) if names_policies else "")
    add_flags(parser, flags_of(options, inherited=True), brief=True)
    trace, simulated = map(parser.add_argument_group, ("requests of a trace", "what is simulated"))
    add_flags(trace, TRACE, within=_OF_TRACE, brief=True)
    add_flags(simulated, SIMULATION, brief=True)


def settings_of(args: Namespace, options: RunsOptions) -> SimulationSettings:
    """Return the validated settings of a run, without a policy: those of a file, and flags.

    Raises:
        ValueError: naming what is wrong.
        OSError: the file cannot be read.
    """
    values = vars(args)
    base = SimulationSettings()
    if options.settings is not None:
        try:
            base = decoded(Path(options.settings).read_bytes(), SimulationSettings)
        except ValueError as error:
            raise ValueError(f"{options.settings}: {error}") from None
    given: dict[str, Any] = {
        flag.field: values[flag.field] for flag in SIMULATION if flag.field in values
    }
    for name in ("engine", "weights"):
        if name in given:
            try:
                given[name] = changed(getattr(base, name), given[name])
            except ValueError as error:
                raise ValueError(f"--{name}: {error}") from None
    trace = {
        name.removeprefix(_OF_TRACE): value
        for name, value in values.items()
        if name.startswith(_OF_TRACE)
    }
    if "path" in trace:
        given["trace"] = Trace(**trace)
    for flag in TRACE:
        if flag.field in trace and "path" not in trace:
            raise ValueError(f"{flag.name} is of a --trace")
    if "speed" in trace and isinstance(options, LoadedOptions) and options.load is not None:
        raise ValueError("--speed or --load, one of them")
    settings = replace(base, **given)
    settings.validate()
    return settings
