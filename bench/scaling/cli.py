"""`python -m bench.scaling`: saturated POST /select with the server on one core, on two, on all.

A line per contender and set of cores; ours also per number of processes that share nothing, each
with a port of its own, as for several models. Clients are processes of their own, on the cores the
server does not have, if there are any: what is measured is the slower of the two sides, so look at
the cores in use before calling a server slow.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from bench.compare.peer import VERSIONS, PeerMissing
from bench.compare.report import number
from bench.compare.servers import OURS, RunningServer, contenders, is_ours
from bench.compare.target import Target
from bench.compare.workloads import selections
from bench.load.events import Publishers
from bench.load.http import BadAnswer, drive
from bench.output import progress, raise_descriptor_limit, result_path, write_json
from bench.provenance import provenance
from bench.scaling.cores import other_cores, parse_cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.compare.servers import Contender

__all__ = ["Measured", "Setting", "main", "table"]

_WORKERS = 16
_RING = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """One line: a contender, how many processes, and the cores it may use (empty: all)."""

    contender: str
    processes: int
    cores: tuple[int, ...]

    def text(self) -> str:
        """For the table."""
        return ",".join(map(str, self.cores)) or "all"


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of one setting."""

    isl: int
    setting: Setting
    requests_per_s: float
    cpu_us: float  # per request
    cores_used: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all settings in turn, print the table, write the JSON; 1 on a wrong answer."""
    args = _parser().parse_args(argv)
    raise_descriptor_limit()
    where = provenance()
    measured: list[Measured] = []
    try:
        settings = _settings(args)
        for isl in (int(one) for one in args.isl.split(",")):
            measured += _measure(args, settings, isl)
    except (BadAnswer, PeerMissing, ValueError) as error:
        progress(f"bench: {error}")
        return 1
    print(table(measured))
    document = {
        **where,
        "settings": {"clients": args.clients, "connections": args.connections},
        "samples": [asdict(one) for one in measured],
    }
    write_json(args.out or result_path(document, "scaling"), document)
    return 0


def table(measured: Sequence[Measured]) -> str:
    """Markdown, medians over the rounds."""
    head = ["isl", "contender", "processes", "cores", "requests/s", "CPU µs", "cores used"]
    lines = [head, ["---"] * len(head)]
    keys = dict.fromkeys((one.isl, one.setting) for one in measured)
    for isl, setting in keys:
        rounds = [one for one in measured if (one.isl, one.setting) == (isl, setting)]
        medians = (
            statistics.median(values)
            for values in zip(
                *((one.requests_per_s, one.cpu_us, one.cores_used) for one in rounds), strict=True
            )
        )
        cells = [str(isl), setting.contender, str(setting.processes), setting.text()]
        lines.append([*cells, *map(number, medians)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _settings(args: argparse.Namespace) -> list[tuple[Setting, Contender]]:
    found = []
    for cores in (parse_cores(one) for one in args.cores.split(";")):
        pin = ("taskset", "--cpu-list", ",".join(map(str, cores))) if cores else ()
        for name in args.contenders.split(","):
            # the peer is one process with threads
            counts = args.processes.split(",") if is_ours(name) else ["1"]
            (contender,) = contenders((name,))
            pinned = replace(contender, command=(*pin, *contender.command))
            found += [(Setting(name, processes, cores), pinned) for processes in map(int, counts)]
    return found


def _measure(
    args: argparse.Namespace, settings: Sequence[tuple[Setting, Contender]], isl: int
) -> list[Measured]:
    measured = []
    with ExitStack() as stack:
        targets = [
            (setting, [_target(stack, contender, args) for _ in range(setting.processes)])
            for setting, contender in settings
        ]
        count = max(args.clients, *(setting.processes for setting, _ in settings))
        clients = stack.enter_context(ProcessPoolExecutor(count, mp_context=get_context("spawn")))
        for round_number in range(args.rounds + 1):
            for setting, of_setting in targets:
                one = _round(args, (clients, count), setting, of_setting, isl)
                if round_number:
                    measured.append(one)
            progress(f"isl {isl}: round {round_number} of {args.rounds}")
    return measured


def _target(stack: ExitStack, contender: Contender, args: argparse.Namespace) -> Target:
    server = stack.enter_context(RunningServer(contender))
    publishers = stack.enter_context(Publishers(_WORKERS, shared=True))
    target = Target(server, publishers, args.connections)
    target.register_workers()
    return target


def _round(
    args: argparse.Namespace,
    clients: tuple[ProcessPoolExecutor, int],
    setting: Setting,
    targets: Sequence[Target],
    isl: int,
) -> Measured:
    pool, count = clients
    cores = other_cores(setting.cores, os.cpu_count() or 1)
    jobs = [
        (targets[one % len(targets)].server.address, isl, args.operations, args.connections, cores)
        for one in range(count)
    ]
    list(pool.map(_client, [(*job[:2], _RING, *job[3:]) for job in jobs]))  # all are ready
    before = sum(target.server.cpu_s() for target in targets)
    seconds = list(pool.map(_client, jobs))
    cpu_s = sum(target.server.cpu_s() for target in targets) - before
    rate = sum(args.operations / one for one in seconds)
    requests = args.operations * count
    return Measured(isl, setting, rate, cpu_s / requests * 1e6, cpu_s / max(seconds))


def _client(job: tuple[tuple[str, int], int, int, int, tuple[int, ...]]) -> float:
    """In a process of its own: so many selections, every answer checked; seconds it took."""
    address, isl, operations, connections, cores = job
    os.sched_setaffinity(0, cores)
    operation, check = selections(range(1, _WORKERS + 1), isl, _RING)
    started_at = time.perf_counter()
    drive(address, operation, check, operations=range(operations), connections=connections)
    return time.perf_counter() - started_at


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__)
    parser.add_argument("--isl", default="512,2048", help="prompt lengths (default: %(default)s)")
    parser.add_argument(
        "--cores",
        default="0;all",
        help="sets of cores for the server, like 0;0,1;all (default: %(default)s)",
    )
    parser.add_argument("--processes", default="1", help="of ours, like 1,2 (default: 1)")
    parser.add_argument("--contenders", default=f"{OURS},{VERSIONS[0]}", help="%(default)s")
    parser.add_argument(
        "--clients", type=int, default=1, help="client processes (default: %(default)s)"
    )
    parser.add_argument(
        "--connections", type=int, default=16, help="of each client (default: %(default)s)"
    )
    parser.add_argument(
        "--operations", type=int, default=6000, help="of each client and round (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="after the warm-up (%(default)s)")
    parser.add_argument("--out", type=Path, help="default: bench/results/<time>-scaling-….json")
    return parser
