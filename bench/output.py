"""What all benchmarks' command lines do alike: progress, descriptors, the file of results."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "RESULTS",
    "can_draw",
    "progress",
    "raise_descriptor_limit",
    "result_path",
    "write_json",
]

RESULTS = Path(__file__).resolve().parent / "results"


def progress(line: str) -> None:
    """Say something that is no result: on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


def can_draw() -> bool:
    """Prepare matplotlib, whose files are then the same twice; False where it is missing."""
    try:
        import matplotlib as mpl  # an extra, and seconds to import
    except ImportError:
        progress("bench: no matplotlib here: pip install '.[bench]'")
        return False
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "bench"
    return True


def raise_descriptor_limit() -> None:
    """A thousand workers are thousands of sockets, here and in the processes we start."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def result_path(document: Mapping[str, object], what: str = "") -> Path:
    """`bench/results/<time>-[<what>-]<commit>.json`."""
    stamp = str(document["taken_at"]).replace(":", "").replace("+0000", "Z")
    middle = f"{what}-" if what else ""
    return RESULTS / f"{stamp}-{middle}{str(document['commit'])[:8]}.json"


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write it, one value a line, so that two runs can be compared by diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    progress(f"written to {path}")
