"""`python -m bench.profile W1@2048`: run our server under a workload and py-spy, keep the result.

py-spy looks at the process from outside, some hundred times a second, and stops it while it looks:
shares of time are right, times are not. Needs the extra `bench`, and the right to trace (as root,
or with ptrace_scope 0).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from bench.compare.served import Served
from bench.compare.servers import OURS, VARIANTS, contenders
from bench.compare.suite import is_chosen, suite
from bench.output import progress, raise_descriptor_limit
from bench.profile.stacks import collapsed, merged, note, parse
from bench.provenance import provenance

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.compare.served import ServedSession

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Profile each workload that is named; 1 when there is none, or no profiler."""
    args = _parser().parse_args(argv)
    profiler = _profiler()
    if profiler is None:
        progress("bench: no py-spy here: pip install '.[bench]'")
        return 1
    raise_descriptor_limit()
    (contender,) = contenders((args.contender,))
    chosen = [one for one in suite() if is_chosen(one.name, args.workload)]
    served = [one for one in chosen if isinstance(one, Served)]
    if not served:
        progress(f"bench: no workload over HTTP is called {args.workload}")
        return 1
    for workload in served:
        stem = args.out / f"{_file_name(workload.name)}-{args.contender}"
        stem.parent.mkdir(parents=True, exist_ok=True)
        with workload.session(contender, args.connections) as session:
            rounds = count()  # content of its own in each, or W6 would wait for what is there
            session.round(next(rounds))
            for format_, suffix in (("raw", ".collapsed"), ("flamegraph", ".svg")):
                path = stem.with_name(stem.name + suffix)
                command = [
                    *(profiler, "record", "--pid", str(session.target.server.pid)),
                    *("--duration", str(args.seconds), "--rate", str(args.rate)),
                    *("--format", format_, "--output", str(path)),
                    *(["--native"] if args.native else []),
                ]
                _record(command, session, rounds)
        kept = stem.with_name(stem.name + ".collapsed")
        stacks = merged(parse(kept.read_text(encoding="utf-8")))
        kept.write_text(collapsed(stacks), encoding="utf-8")
        where = provenance()
        facts = {
            "taken": str(where["taken_at"]),
            "commit": str(where["commit"])[:12] + (" +" if where["uncommitted_changes"] else ""),
            "machine": f"{where['machine']['cpu']}, Python {where['python']}",
            "load average": f"{where['machine']['load_average'][0]:.1f}",
            "seconds, samples a second": f"{args.seconds}, {args.rate}",
        }
        text = note(f"{workload.name}: {args.contender}", facts, stacks)
        stem.with_name(stem.name + ".md").write_text(text, encoding="utf-8")
        print(text)
    return 0


def _record(command: list[str], session: ServedSession, rounds: Iterator[int]) -> None:
    """Keep the server busy with rounds for as long as the profiler looks."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as recorder:
        while recorder.poll() is None:
            session.round(next(rounds))
        if recorder.returncode:
            assert recorder.stderr is not None
            raise SystemExit(f"bench: py-spy failed: {recorder.stderr.read().decode()[-500:]}")


def _profiler() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _file_name(name: str) -> str:
    """Of a workload: letters and digits, the rest dashes."""
    parts = "".join(one if one.isalnum() else " " for one in name).split()
    return "-".join(parts).lower()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__)
    parser.add_argument("workload", help="short name (W1@2048) or a part of the name")
    parser.add_argument(
        "--contender", default=OURS, choices=list(VARIANTS), help="default: %(default)s"
    )
    parser.add_argument(
        "--seconds", type=int, default=10, help="of each of two recordings (default: %(default)s)"
    )
    parser.add_argument(
        "--rate", type=int, default=500, help="looks per second (default: %(default)s)"
    )
    parser.add_argument("--native", action="store_true", help="with frames of compiled code")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/profiles"),
        help="folder (default: %(default)s)",
    )
    return parser
