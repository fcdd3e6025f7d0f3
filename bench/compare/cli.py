"""`python -m bench.compare`: which workloads, rounds, contenders and the output file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.compare.peer import VERSIONS, PeerMissing
from bench.compare.regression import regressions
from bench.compare.report import document, rows, table
from bench.compare.results import NotAResult, ResultRow, known, read
from bench.compare.run import measure
from bench.compare.servers import OURS, VARIANTS, InterpreterUnfit, contenders
from bench.compare.suite import is_chosen, suite
from bench.compare.targets import Verdict
from bench.load.events import SubscriptionMissing
from bench.load.http import BadAnswer
from bench.neighbours import DISTURBED, Watch, wait_for_quiet
from bench.output import progress, raise_descriptor_limit, result_path, write_json
from bench.provenance import provenance

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from bench.compare.report import Row
    from bench.compare.run import Sample
    from bench.compare.servers import Contender

__all__ = ["disturbed_rows", "main"]

_QUICK_ROUNDS = 3
_ROUNDS = 7
_FINE = 4
_LAST = "last"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON.

    Returns:
        1 when a contender answered wrongly, 2 when a ratio has become worse than it was.
    """
    args = _parser().parse_args(argv)
    names = tuple(args.contenders.split(","))
    raise_descriptor_limit()
    try:
        running = contenders(names)
        before = _before(args.compare_with)
    except (PeerMissing, InterpreterUnfit, NotAResult) as error:
        progress(f"bench: {error}")
        return 1
    where = provenance()
    samples, void, others = _measure_all(args, running)
    found = rows(samples)
    print(table(found, names))
    print(_summary(found))
    if disturbed := [f"{n} {share:.0%}" for n, share in others.items() if share > DISTURBED]:
        print(f"not to be trusted, for what others took of the machine: {'; '.join(disturbed)}")
    settings = {
        "contenders": names,
        "rounds": _rounds(args),
        "connections": args.connections,
        "quick": args.quick,
        "fine": args.fine,
        "void": void,
        "others_share": others,
    }
    result = document(where, settings, samples)
    write_json(args.out or result_path(result), result)
    worse = _has_regressions(before, found, disturbed_rows(found, others))
    if void:
        return 1
    return 2 if worse else 0


def _measure_all(
    args: argparse.Namespace, running: Sequence[Contender]
) -> tuple[list[Sample], dict[str, str], dict[str, float]]:
    """Samples; which workloads are void and why; what others took of the machine in each."""
    samples: list[Sample] = []
    void: dict[str, str] = {}
    others: dict[str, float] = {}
    for workload in suite(quick=args.quick, fine=_FINE if args.fine else 1):
        if not is_chosen(workload.name, args.only):
            continue
        wait_for_quiet(args.wait_quiet)
        watch = Watch.now()
        try:
            samples += measure(
                *(workload, running),
                rounds=_rounds(args),
                connections=args.connections,
                progress=progress,
            )
        except (BadAnswer, SubscriptionMissing, OSError) as error:
            void[workload.name] = str(error)
            progress(f"bench: {workload.name} is void: {error}")
        others[workload.name] = watch.share(Watch.now(), os.cpu_count() or 1)
    return samples, void, others


def _rounds(args: argparse.Namespace) -> int:
    rounds: int = args.rounds or (_QUICK_ROUNDS if args.quick else _ROUNDS)
    return rounds * (_FINE if args.fine else 1)


def _summary(found: Sequence[Row]) -> str:
    """How many targets are met, by pair."""
    verdicts: dict[str, list[str]] = {}
    for row in found:
        for pair, ratio in row.ratios.items():
            if ratio.verdict is not None:
                verdicts.setdefault(pair, []).append(ratio.verdict)
    return "\n".join(
        f"{pair}: " + ", ".join(f"{some.count(str(one))} {one}" for one in Verdict)
        for pair, some in verdicts.items()
    )


def _before(wanted: str | None) -> tuple[Sequence[Path], Sequence[ResultRow]] | None:
    """The rows to compare with, and the files they are from."""
    if wanted is None:
        return None
    if wanted != _LAST:
        return [Path(wanted)], read(Path(wanted)).rows
    paths, found = known()
    if not paths:
        progress("bench: no committed result to compare with")
        return None
    return paths, found


def _has_regressions(
    before: tuple[Sequence[Path], Sequence[ResultRow]] | None,
    found: Sequence[Row],
    disturbed: Collection[str],
) -> bool:
    """Print what has become worse; a row that others have disturbed proves nothing."""
    if before is None:
        return False
    paths, old = before
    now = msgspec.convert(found, list[ResultRow], from_attributes=True)
    worse = regressions(old, now)
    for one in worse:
        print(f"{'looks worse, disturbed' if one.row in disturbed else 'worse'}: {one.text()}")
    count = sum(one.row not in disturbed for one in worse)
    known_ratios = {(row.row, pair) for row in old for pair in row.ratios}
    compared = sum((row.row, pair) in known_ratios for row in now for pair in row.ratios)
    print(f"{compared} ratios compared with {', '.join(p.name for p in paths)}: {count} worse")
    return bool(count)


def disturbed_rows(found: Sequence[Row], others: Mapping[str, float]) -> set[str]:
    """Rows of the workloads during which others took too much of the machine."""
    noisy = tuple(name for name, share in others.items() if share > DISTURBED)
    return {row.row for row in found if row.row.startswith(noisy)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer, shorter, smaller")
    parser.add_argument(
        "--only",
        metavar="W1@512;W4",
        help="workloads by short name or by a part of their name, split at semicolons",
    )
    parser.add_argument("--rounds", type=int, help="rounds per workload after the warm-up")
    parser.add_argument(
        "--fine",
        action="store_true",
        help=f"{_FINE} times the rounds with 1/{_FINE} of the operations: turns are shorter than"
        " most of a neighbour's bursts",
    )
    parser.add_argument(
        "--wait-quiet",
        type=float,
        default=0.0,
        metavar="S",
        help="before each workload wait, at most so long, for others to leave the machine alone",
    )
    parser.add_argument(
        "--contenders",
        default=f"{OURS},{VERSIONS[0]}",
        help=f"variants of this service ({', '.join(VARIANTS)}; VARIANT@PYTHON: by another "
        "interpreter of this version) and versions of the peer"
        f" ({', '.join(VERSIONS)}) (default: %(default)s)",
    )
    parser.add_argument(
        "--connections", type=int, default=16, help="kept-alive connections (default: %(default)s)"
    )
    parser.add_argument(
        "--compare-with",
        metavar=f"FILE|{_LAST}",
        help="exit with 2 if a ratio is worse than in this result beyond noise;"
        f" {_LAST}: than in the newest committed result that has it",
    )
    parser.add_argument(
        "--out", type=Path, help="JSON file (default: bench/results/<time>-<commit>.json)"
    )
    return parser
