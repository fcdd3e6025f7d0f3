"""From what a selection costs on one core and on two to what sixteen could serve: a model on paper.

Reads the samples of `bench.scaling`; `plot.py` draws what comes of it. CPU per request, not the
rate that was seen: beside clients and neighbours on two cores the rate says what they left.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["Scaling", "read", "scalings"]

_SHARE_USED = 0.5
"""Of each core: the other half is left free, for bursts and for everybody else."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a contender's selection costs by the number of cores, one process for each or threads.

    `growth` is how many times as much CPU one takes with each doubling: 1 is a straight line.
    """

    contender: str
    cpu_us: Mapping[int, float]  # by cores
    growth: float

    def measured(self) -> list[tuple[int, float]]:
        """(cores, selections/s) from what was measured there, at half of each core."""
        return [(cores, self._rate(cores, cost)) for cores, cost in sorted(self.cpu_us.items())]

    def careful(self, cores: Iterable[int]) -> list[tuple[int, float]]:
        """The model: each doubling costs what the one measured has cost."""
        first = self.cpu_us[1]
        return [
            (count, self._rate(count, first * self.growth ** math.log2(count))) for count in cores
        ]

    def straight(self, cores: Iterable[int]) -> list[tuple[int, float]]:
        """The other end: processes that share nothing cost each other nothing."""
        return [(count, self._rate(count, self.cpu_us[1])) for count in cores]

    @staticmethod
    def _rate(cores: int, cpu_us: float) -> float:
        return cores * _SHARE_USED * 1e6 / cpu_us


def read(path: Path) -> dict[str, Any]:
    """Return a result of `bench.scaling`.

    Raises:
        ValueError: it is none.
    """
    document = json.loads(path.read_bytes())
    if not isinstance(document, dict) or not document.get("samples"):
        raise ValueError(f"{path}: no result of bench.scaling")
    return document


def scalings(document: Mapping[str, Any], isl: int) -> list[Scaling]:
    """Return every contender that was measured on one core, by prompts of one length.

    Ours counts where it has a process for each core, the peer where it is one process: so each of
    them makes use of two. A growth below 1 is noise, and counts as 1.
    """
    costs: dict[tuple[str, int], list[float]] = {}
    for sample in document["samples"]:
        setting = sample["setting"]
        cores = len(setting["cores"]) or int(document["machine"]["cpus"])
        fits = setting["processes"] == cores or not setting["contender"].startswith("ours")
        if sample["isl"] == isl and fits:
            costs.setdefault((setting["contender"], cores), []).append(sample["cpu_us"])
    found: dict[str, dict[int, float]] = {}
    for (contender, cores), values in costs.items():
        found.setdefault(contender, {})[cores] = statistics.median(values)
    return [
        Scaling(contender, by_cores, _growth(by_cores))
        for contender, by_cores in found.items()
        if 1 in by_cores
    ]


def _growth(by_cores: Mapping[int, float]) -> float:
    most = max(by_cores)
    if most == 1:
        return 1.0
    return max(1.0, (by_cores[most] / by_cores[1]) ** (1 / math.log2(most)))
