"""`python -m bench.admission`: which policies, which loads, for how long, where to."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.admission.capacity import Capacity, measure_capacity
from bench.admission.live import play_live
from bench.admission.play import Script
from bench.admission.policies import contenders
from bench.admission.report import Line, table
from bench.admission.simulated import simulate
from bench.admission.workload import WEIGHTS, read_workload
from bench.compare.servers import Contender as Server
from bench.compare.servers import RunningServer
from bench.load.http import BadAnswer
from bench.output import progress, raise_descriptor_limit, result_path, write_json
from bench.provenance import provenance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.admission.contender import Contender

__all__ = ["main"]

_SERVICE = (sys.executable, "-m", "select_service", "--host", "127.0.0.1")


def main(argv: Sequence[str] | None = None) -> int:
    """Play every load before every policy, print the tables, write the JSON.

    Returns:
        1 when a run broke off, or did not account for every request.
    """
    args = _parser().parse_args(argv)
    os.environ["DYN_USE_KV_EVENTS"] = "false"  # of the service: its workers publish none
    # The queue of Dynamo's contract is off: policies see all load, none waits in front of them.
    os.environ["DYN_ROUTER_QUEUE_THRESHOLD"] = "inf"
    raise_descriptor_limit()
    script = Script(
        read_workload(args.workload),
        rate=0.0,
        seconds=args.seconds,
        warm_up_s=args.warm_up,
        seed=args.seed,
        workers=args.workers,
    )
    where = provenance()
    capacity = _capacity(args, script)
    chosen = [
        one
        for one in contenders(script, capacity, args.time_scale)
        if not args.policies or one.name in args.policies.split(",")
    ]
    lines, broken = _play_all(args, script, capacity, chosen)
    print(table(lines))
    settings = {
        "loads": args.loads,
        "time_scale": args.time_scale,
        "simulated": args.simulated,
        "capacity": msgspec.to_builtins(capacity),
        "script": msgspec.to_builtins(script),
        "targets_s": script.workload.targets_s,
        "weights": WEIGHTS,
        "broken": broken,
    }
    rows = [line.document() for line in lines]
    result = {**where, "settings": settings, "rows": rows}
    write_json(args.json or result_path(result, "admission"), result)
    unaccounted = sum(line.unaccounted for line in lines)
    return 1 if broken or unaccounted else 0


def _capacity(args: argparse.Namespace, script: Script) -> Capacity:
    if args.rate:
        tokens = args.rate * script.workload.mean_tokens
        return Capacity(args.rate, tokens, args.in_flight)
    return measure_capacity(script, progress)


def _play_all(
    args: argparse.Namespace, script: Script, capacity: Capacity, chosen: Sequence[Contender]
) -> tuple[list[Line], dict[str, str]]:
    lines: list[Line] = []
    broken: dict[str, str] = {}
    for load in (float(one) for one in args.loads.split(",")):
        for one in chosen:
            played = replace(script, rate=load * capacity.rate)
            try:
                line = _play(args, one, played, load)
            except* (BadAnswer, OSError) as errors:
                broken[f"{one.name} at {load:g}"] = "; ".join(map(str, errors.exceptions))
                progress(f"{one.name} at {load:g} broke off: {errors.exceptions[0]}")
            else:
                lines.append(line)
                progress(_summary(line))
    return lines, broken


def _play(args: argparse.Namespace, one: Contender, script: Script, load: float) -> Line:
    alone = simulate(script, one, time_scale=args.time_scale)
    if args.simulated:
        return Line(load, one.name, one.config, alone, None)
    flags = () if one.policy == "always-admit" and not one.config else one.flags(args.time_scale)
    with RunningServer(Server(one.name, (*_SERVICE, *flags))) as server:
        result, traffic = play_live(server.address, script, time_scale=args.time_scale)
        return Line(load, one.name, one.config, result, traffic, server.cpu_s(), alone)


def _summary(line: Line) -> str:
    result = line.result
    attained = " ".join(f"{name} {one.attained:.3f}" for name, one in result.classes.items())
    retry = "" if result.first_retry is None else f" first retry {result.first_retry:.3f}"
    traffic = ""
    if line.traffic is not None:
        wall_s = line.traffic.wall_s
        traffic = (
            f"; {line.traffic.calls / wall_s:.0f} calls/s,"
            f" CPU client {line.traffic.client_cpu_s / wall_s:.0%}"
            f" service {line.server_cpu_s / wall_s:.0%},"
            f" at worst {result.lateness_s * 1e3:.0f} ms late"
        )
    return f"{line.load:g}x {line.policy:14} {attained}{retry}{traffic}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.admission", description=__doc__)
    parser.add_argument("--policies", metavar="NAME,NAME", help="only these (default: all)")
    parser.add_argument(
        "--loads", default="0.8,1.2,1.6", help="multiples of capacity (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of measured arrivals (default: %(default)s)"
    )
    parser.add_argument(
        "--warm-up", type=float, default=5.0, help="seconds before (default: %(default)s)"
    )
    parser.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        help="wall seconds per second of the play; more asks less of the machine",
    )
    parser.add_argument("--workload", default="four-class", help="or abusive-tenant")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, help="capacity in requests/s, not measured")
    parser.add_argument(
        "--in-flight", type=int, default=160, help="most requests of a worker, with --rate"
    )
    parser.add_argument(
        "--simulated", action="store_true", help="the policies alone under a fake clock"
    )
    parser.add_argument("--json", type=Path, help="default: bench/results/<time>-<commit>.json")
    return parser
