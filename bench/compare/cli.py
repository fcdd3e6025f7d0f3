"""`python -m bench.compare`: which workloads, how many rounds, against whom, where to."""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.compare.ingest import Ingest
from bench.compare.peer import VERSIONS, PeerMissing
from bench.compare.report import document, provenance, rows, table
from bench.compare.run import Sample, measure
from bench.compare.servers import OURS, contenders
from bench.compare.workloads import Lifecycle, Overlap, Select, Workload
from bench.load.events import SubscriptionMissing
from bench.load.http import BadAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "workloads"]

_RESULTS = Path(__file__).resolve().parents[1] / "results"
_QUICK_ROUNDS = 3
_ROUNDS = 7


def workloads(*, quick: bool) -> list[Workload]:
    """The table of workloads; quick leaves out the largest and does a third of the operations."""
    part = 3 if quick else 1
    chosen: list[Workload] = [
        Select("W1 select, hashes, isl 512", isl=512, operations=9000 // part, ring=256),
        Select("W1 select, hashes, isl 2048", isl=2048, operations=6000 // part),
        Select("W1 select, hashes, isl 8192", isl=8192, operations=3000 // part),
        Overlap("W2 select, 60-95% overlap, isl 2048", isl=2048, operations=6000 // part),
        Overlap("W2 select, 60-95% overlap, isl 8192", isl=8192, operations=3000 // part),
        Select("W3 select, tokens, isl 2048", isl=2048, operations=3000 // part, tokens=True),
        Lifecycle("W4 lifecycle, isl 2048, 256 standing", operations=3000 // part),
        Select("W5 select, 256 workers, isl 2048", isl=2048, operations=4500 // part, workers=256),
        Ingest("W6", blocks=131_072 // (2 if quick else 1)),
    ]
    if quick:
        return chosen
    chosen += [
        Select("W1 select, hashes, isl 32768", isl=32768, operations=900, ring=24),
        Overlap(
            "W2 select, 60-95% overlap, isl 32768", isl=32768, operations=900, families=8, ring=24
        ),
        Select("W3 select, tokens, isl 8192", isl=8192, operations=1200, tokens=True),
        Select("W5 select, 1024 workers, isl 2048", isl=2048, operations=3000, workers=1024),
    ]
    return sorted(chosen, key=lambda workload: workload.name.partition(" ")[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; 1 when a contender answered wrongly."""
    args = _parser().parse_args(argv)
    names = tuple(args.contenders.split(","))
    rounds = args.rounds or (_QUICK_ROUNDS if args.quick else _ROUNDS)
    _raise_descriptor_limit()
    try:
        running = contenders(names)
    except PeerMissing as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    where = provenance()
    samples: list[Sample] = []
    void: dict[str, str] = {}
    for workload in workloads(quick=args.quick):
        if args.only and not any(part in workload.name for part in args.only.split(";")):
            continue
        try:
            samples += measure(
                workload, running, rounds=rounds, connections=args.connections, progress=_progress
            )
        except (BadAnswer, SubscriptionMissing, OSError) as error:
            void[workload.name] = str(error)
            print(f"bench: {workload.name} is void: {error}", file=sys.stderr)
    print(table(rows(samples), names))
    settings = {
        "contenders": names,
        "rounds": rounds,
        "connections": args.connections,
        "quick": args.quick,
        "void": void,
    }
    _write(args.out, document(where, settings, samples))
    return 1 if void else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer, shorter, smaller")
    parser.add_argument(
        "--only",
        metavar="W1;W4",
        help="workloads whose name contains one of these, split at semicolons",
    )
    parser.add_argument("--rounds", type=int, help="rounds per workload after the warm-up")
    parser.add_argument(
        "--contenders",
        default=",".join((OURS, *VERSIONS)),
        help=f"{OURS} and versions of the peer (default: %(default)s)",
    )
    parser.add_argument(
        "--connections", type=int, default=16, help="kept-alive connections (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON file (default: bench/results/<time>-<commit>.json)"
    )
    return parser


def _raise_descriptor_limit() -> None:
    """A thousand workers are thousands of sockets, here and in the contenders we start."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(path: Path | None, result: dict[str, object]) -> None:
    if path is None:
        stamp = str(result["taken_at"]).replace(":", "").replace("+0000", "Z")
        path = _RESULTS / f"{stamp}-{str(result['commit'])[:8]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=1)
    path.write_bytes(encoded + b"\n")
    print(f"written to {path}", file=sys.stderr)
