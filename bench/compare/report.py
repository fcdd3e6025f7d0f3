"""Samples → medians, ratios with their spread, a table, a JSON file that says where it comes from.

A number of ours is never shown without the peer's of the same run: absolute costs do not travel
between machines, ratios nearly do.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.compare.servers import OURS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.compare.run import Sample

__all__ = ["Ratio", "Row", "document", "provenance", "rows", "table"]

_ROOT = Path(__file__).resolve().parents[2]
_OUR_LIBRARIES = ("httptools", "msgspec", "numpy", "pyzmq", "starlette", "uvicorn", "uvloop")


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over a peer's: medians divided, and the lowest and highest of the rounds' own ratios."""

    of_medians: float
    lowest: float
    highest: float

    def text(self) -> str:
        """As the table shows it."""
        return f"{self.of_medians:.2f} ({self.lowest:.2f} to {self.highest:.2f})"


@dataclass(frozen=True, slots=True)
class Row:
    """One phase over all rounds."""

    phase: str
    unit: str
    cpu_us: dict[str, float]  # contender → median
    ratios: dict[str, Ratio]  # peer → ours / peer


def rows(samples: Iterable[Sample]) -> list[Row]:
    """One row per phase, in the order measured."""
    by_phase: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for sample in samples:
        by_contender = by_phase.setdefault((sample.phase, sample.unit), {})
        by_contender.setdefault(sample.contender, {})[sample.round_number] = sample.cpu_us
    return [
        Row(
            phase=phase,
            unit=unit,
            cpu_us={name: statistics.median(costs.values()) for name, costs in measured.items()},
            ratios={
                name: _ratio(measured[OURS], costs)
                for name, costs in measured.items()
                if name != OURS and OURS in measured
            },
        )
        for (phase, unit), measured in by_phase.items()
    ]


def _ratio(ours: dict[int, float], peer: dict[int, float]) -> Ratio:
    per_round = [ours[number] / peer[number] for number in ours.keys() & peer.keys()]
    medians = statistics.median(ours.values()) / statistics.median(peer.values())
    return Ratio(medians, min(per_round), max(per_round))


def table(found: Sequence[Row], contenders: Sequence[str]) -> str:
    """Markdown: medians in CPU µs per unit, then ours / peer."""
    peers = [name for name in contenders if name != OURS]
    compared = peers if OURS in contenders else []
    head = ["workload", "per", *contenders, *(f"{OURS} / {name}" for name in compared)]
    lines = [head, ["---"] * len(head)]
    lines += [
        [
            row.phase,
            row.unit,
            *(f"{row.cpu_us[name]:.2f}" for name in contenders),
            *(row.ratios[name].text() for name in compared),
        ]
        for row in found
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance() -> dict[str, Any]:
    """Machine, commit and versions, taken now."""
    return {
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_model(),
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "load_average": os.getloadavg(),
        },
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "select_service", "indexer")),
        "python": platform.python_version(),
        "libraries": {name: importlib.metadata.version(name) for name in _OUR_LIBRARIES},
    }


def document(
    where: dict[str, Any], settings: dict[str, Any], samples: Sequence[Sample]
) -> dict[str, Any]:
    """Everything there is to say about a run, raw samples included."""
    return {
        **where,
        "load_average_at_end": os.getloadavg(),
        "settings": settings,
        "rows": [asdict(row) for row in rows(samples)],
        "samples": [asdict(sample) for sample in samples],
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _git(*arguments: str) -> str:
    answer = subprocess.run(
        ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip()
