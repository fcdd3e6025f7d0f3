"""Samples → medians, ratios with their spread and verdict, a table, a document for the file.

A number of ours is never shown without the peer's of the same run: absolute costs do not travel
between machines, ratios nearly do.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bench.compare.servers import is_ours
from bench.compare.targets import TARGETS, target_of, verdict
from bench.load.paced import percentile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.compare.run import Sample

__all__ = ["FORMAT", "Ratio", "Row", "document", "number", "pairs", "rows", "table"]

FORMAT = 2
"""Of the file; 1 had CPU times only and no such field."""

_LOW, _HIGH = 0.1, 0.9


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over a peer's: medians divided, and how the rounds' own ratios are spread."""

    of_medians: float
    low: float  # a tenth of the rounds is below
    high: float  # and a tenth above
    rounds: list[float]
    verdict: str | None  # None: the row has no target for this variant of ours

    def text(self) -> str:
        """As the table shows it."""
        judged = f" {self.verdict}" if self.verdict else ""
        return f"{self.of_medians:.2f} ({self.low:.2f} to {self.high:.2f}){judged}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table, over all rounds."""

    row: str
    unit: str
    target: float | None
    medians: dict[str, float]  # by contender
    ratios: dict[str, Ratio]  # by pair, "ours / 1.6.1"


def rows(samples: Iterable[Sample]) -> list[Row]:
    """One per kind of reading, in the order measured."""
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for sample in samples:
        by_contender = found.setdefault((sample.row, sample.unit), {})
        by_contender.setdefault(sample.contender, {})[sample.round_number] = sample.value
    return [_row(row, unit, measured) for (row, unit), measured in found.items()]


def pairs(contenders: Iterable[str]) -> list[tuple[str, str]]:
    """Each variant of ours with each peer."""
    names = list(contenders)
    return [(ours, peer) for ours in names if is_ours(ours) for peer in names if not is_ours(peer)]


def table(found: Sequence[Row], contenders: Sequence[str]) -> str:
    """Markdown: medians, targets, then ours / peer with brackets and verdict."""
    compared = [f"{ours} / {peer}" for ours, peer in pairs(contenders)]
    head = ["workload", "unit", *contenders, "target", *compared]
    lines = [head, ["---"] * len(head)]
    lines += [
        [
            row.row,
            row.unit,
            *(number(row.medians[name]) if name in row.medians else "-" for name in contenders),
            "-" if row.target is None else f"≤ {row.target:g}",
            *(row.ratios[pair].text() if pair in row.ratios else "-" for pair in compared),
        ]
        for row in found
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float) -> str:
    """Three digits that matter."""
    for digits, least in ((0, 100.0), (1, 10.0), (2, 1.0)):
        if value >= least:
            return f"{value:.{digits}f}"
    return f"{value:.3f}"


def document(
    where: dict[str, Any], settings: dict[str, Any], samples: Sequence[Sample]
) -> dict[str, Any]:
    """Everything there is to say about a run, raw samples included."""
    return {
        "format": FORMAT,
        **where,
        "load_average_at_end": os.getloadavg(),
        "settings": settings,
        "rows": [asdict(row) for row in rows(samples)],
        "samples": [asdict(sample) for sample in samples],
    }


def _row(row: str, unit: str, measured: dict[str, dict[int, float]]) -> Row:
    return Row(
        row=row,
        unit=unit,
        target=TARGETS.get(row),
        medians={name: statistics.median(costs.values()) for name, costs in measured.items()},
        ratios={
            f"{ours} / {peer}": _ratio(measured[ours], measured[peer], target_of(row, ours))
            for ours, peer in pairs(measured)
        },
    )


def _ratio(ours: dict[int, float], peer: dict[int, float], target: float | None) -> Ratio:
    rounds = [ours[one] / peer[one] for one in sorted(ours.keys() & peer.keys())]
    medians = statistics.median(ours.values()) / statistics.median(peer.values())
    return Ratio(
        medians,
        percentile(rounds, _LOW),
        percentile(rounds, _HIGH),
        rounds,
        None if target is None else str(verdict(medians, target)),
    )
