"""From what a selection costs on one core and on two to what sixteen could serve: a model on paper.

Reads the samples of `bench.scaling`; `plot.py` draws what comes of it. CPU per request, not the
rate that was seen: beside clients and neighbours on two cores the rate says what they left.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["Scaling", "read", "scalings"]

_SHARE_USED = 0.5
"""Of each core: the other half is left free, for bursts and for all others."""


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
        """The model: each doubling costs as much more as those that were measured, at worst."""
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
    document = orjson.loads(path.read_bytes())
    if not isinstance(document, dict) or not document.get("samples"):
        raise ValueError(f"{path}: no result of bench.scaling")
    return document


def scalings(document: Mapping[str, Any], isl: int) -> list[Scaling]:
    """Return every contender that was measured on one core, by prompts of one length.

    Ours counts where it has a process for each core, the peer where it is one process: so each of
    them makes use of two. The growth is the largest that any length has shown, and 1 at least:
    that two cores should make a request cheaper is noise.
    """
    by_length = {one: _costs(document, one) for one in sorted(_lengths(document))}
    return [
        Scaling(
            contender,
            by_cores,
            max(1.0, *(_growth(costs.get(contender, {})) for costs in by_length.values())),
        )
        for contender, by_cores in by_length.get(isl, {}).items()
        if 1 in by_cores
    ]


def _lengths(document: Mapping[str, Any]) -> set[int]:
    return {sample["isl"] for sample in document["samples"]}


def _costs(document: Mapping[str, Any], isl: int) -> dict[str, dict[int, float]]:
    """Medians by contender and number of cores."""
    samples: dict[str, dict[int, list[float]]] = {}
    for sample in document["samples"]:
        setting = sample["setting"]
        cores = len(setting["cores"]) or int(document["machine"]["cpus"])
        fits = setting["processes"] == cores or not setting["contender"].startswith("ours")
        if sample["isl"] == isl and fits:
            by_cores = samples.setdefault(setting["contender"], {})
            by_cores.setdefault(cores, []).append(sample["cpu_us"])
    return {
        contender: {cores: statistics.median(values) for cores, values in by_cores.items()}
        for contender, by_cores in samples.items()
    }


def _growth(by_cores: Mapping[int, float]) -> float:
    """How many times as much one takes with each doubling, from one core to the most."""
    most = max(by_cores, default=1)
    if most == 1 or 1 not in by_cores:
        return 1.0
    return float((by_cores[most] / by_cores[1]) ** (1 / math.log2(most)))
