"""Clients and their requests: the classes of a workload file, and their arrivals from a seed.

Times are model seconds from the start of a run; `live.py` says how long those take.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["SHEDDABLE", "TARGETS_S", "WEIGHTS", "Client", "Source", "Workload", "read_workload"]

TARGETS_S = {"critical": 2.0, "standard": 4.0, "batch": 10.0, "sheddable": 10.0, "background": 20.0}
"""Time to first token that counts as in time, from the client's first attempt, if the workload's
file has no `targets_s` of its own."""
WEIGHTS = {"critical": 8.0, "standard": 4.0, "batch": 1.0, "sheddable": 0.5, "background": 0.25}
"""What an answer in time is worth."""
SHEDDABLE = frozenset({"batch", "sheddable", "background"})


@dataclass(slots=True, eq=False)
class Client:
    """One request from its first attempt to its end, and all that became of it."""

    number: int
    slo_class: str
    tenant_id: str
    tokens: int
    output_tokens: int
    arrives_at: float
    target_s: float = 0.0  # 0: that of its class
    is_measured: bool = True
    tries: int = 0
    refusals: list[str] = field(default_factory=list)  # reasons, in order
    returned_at: float | None = None  # its second attempt
    returns_at: float | None = None  # when it will come again
    admitted_at: float | None = None
    worker_id: int = -1
    first_token_at: float | None = None
    failure: str = ""

    def __post_init__(self) -> None:
        """Take the class's target if there is none."""
        self.target_s = self.target_s or TARGETS_S[self.slo_class]


@dataclass(frozen=True, slots=True)
class Source:
    """One stream of equal requests of one tenant."""

    slo_class: str
    tenant_id: str
    share: float  # of all requests
    tokens: int
    output_tokens: int
    cv: float  # of the gaps between arrivals; 1: Poisson

    def arrivals(self, rate: float, rng: Random) -> Iterator[float]:
        """Times of a renewal process with gamma gaps; Poisson is the one with cv 1."""
        shape = 1.0 / self.cv**2
        scale = 1.0 / (rate * self.share * shape)
        now = 0.0
        while True:
            now += rng.gammavariate(shape, scale)
            yield now


@dataclass(frozen=True, slots=True)
class Workload:
    """Sources whose shares add up to 1."""

    name: str
    sources: tuple[Source, ...]
    targets_s: dict[str, float]

    @property
    def classes(self) -> list[str]:
        """Most important first."""
        named = {source.slo_class for source in self.sources}
        return [name for name in TARGETS_S if name in named]

    @property
    def mean_tokens(self) -> float:
        """Input tokens of a request on average."""
        return sum(source.share * source.tokens for source in self.sources)

    def clients(self, rate: float, seed: int) -> Iterator[Client]:
        """Endless arrivals, `rate` a second together; equal for equal seeds."""
        # Each source has a generator of its own: the same seed at another rate gives the same
        # sequence of gaps, only denser.
        streams = [
            zip(source.arrivals(rate, Random(f"{seed}-{order}")), repeat(order))
            for order, source in enumerate(self.sources)
        ]
        for number, (at, order) in enumerate(heapq.merge(*streams)):
            source = self.sources[order]
            yield Client(
                number,
                source.slo_class,
                source.tenant_id,
                source.tokens,
                source.output_tokens,
                at,
                self.targets_s[source.slo_class],
            )


def read_workload(name: str) -> Workload:
    """Read `<name>_workload.yaml` beside this file; its aggregate rate is not used.

    Raises:
        ValueError: no such file, or something in it that is not understood.
    """
    path = Path(__file__).with_name(f"{name.replace('-', '_')}_workload.yaml")
    if not path.exists():
        known = sorted(one.name[: -len("_workload.yaml")] for one in path.parent.glob("*.yaml"))
        raise ValueError(f"unknown workload {name!r}; known are {', '.join(known)}")
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    sources = tuple(_source(one) for one in document["clients"])
    targets_s = document.get("targets_s", TARGETS_S)
    _check(sources, targets_s)
    return Workload(name, sources, targets_s)


def _source(one: dict[str, Any]) -> Source:
    arrival = one["arrival"]
    if arrival["process"] not in {"poisson", "gamma"}:
        raise ValueError(f"unknown arrival process {arrival['process']!r}")
    return Source(
        one["slo_class"],
        one["tenant_id"],
        one["rate_fraction"],
        _constant(one["input_distribution"]),
        _constant(one["output_distribution"]),
        arrival.get("cv", 1.0),
    )


def _constant(distribution: dict[str, Any]) -> int:
    if distribution["type"] != "constant":
        raise ValueError(f"unknown distribution {distribution['type']!r}")
    value: int = distribution["params"]["value"]
    return value


def _check(sources: Sequence[Source], targets_s: Mapping[str, float]) -> None:
    if abs(sum(source.share for source in sources) - 1.0) > 1e-9:
        raise ValueError("the shares of a workload must add up to 1")
    unknown = {source.slo_class for source in sources} - (targets_s.keys() & WEIGHTS.keys())
    if unknown:
        raise ValueError(f"no target for class {', '.join(sorted(unknown))}")
