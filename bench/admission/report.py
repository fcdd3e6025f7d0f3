"""Results side by side: one table per load, a line per policy; and everything as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.admission.live import Traffic
    from bench.admission.measures import ClassResult, Result

__all__ = ["Line", "table"]


@dataclass(frozen=True, slots=True)
class Line:
    """One policy under one load."""

    load: float
    policy: str
    config: dict[str, Any]
    result: Result
    traffic: Traffic | None  # None: without the service
    server_cpu_s: float = 0.0
    simulated: Result | None = None  # the same without the service

    @property
    def unaccounted(self) -> int:
        """What must be 0.

        Requests without an outcome or with a failed one, lifecycle calls that were refused, and
        1 if the service itself does not account for all.
        """
        result = self.result
        lost = result.offered - sum(result.outcomes.values()) + result.outcomes.get("failed", 0)
        if self.traffic is not None:
            lost += self.traffic.refused_operations + (not self.traffic.is_conserved)
        return lost

    @property
    def apart(self) -> float | None:
        """By how many points some class did better or worse than without the service, at most."""
        if self.simulated is None:
            return None
        alone = self.simulated.classes
        return 100 * max(
            abs(one.attained - alone[name].attained) for name, one in self.result.classes.items()
        )

    def document(self) -> dict[str, Any]:
        """All of it, for JSON."""
        derived = {
            "attained": self.result.attained,
            "attained_at_first": self.result.attained_at_first,
            "first_retry": self.result.first_retry,
            "points_apart": self.apart,
            "attained_by_class": {
                name: [one.attained_at_first, one.attained]
                for name, one in self.result.classes.items()
            },
        }
        traffic = None if self.traffic is None else self.traffic._asdict()
        return {**asdict(self), "traffic": traffic, **derived}


def table(lines: Sequence[Line]) -> str:
    """Markdown: a table per load; shares in per cent, at the first attempt / with returns."""
    loads = sorted({line.load for line in lines})
    return "\n\n".join(_of_load(load, [one for one in lines if one.load == load]) for load in loads)


def _of_load(load: float, lines: Sequence[Line]) -> str:
    classes = list(lines[0].result.classes)
    head = [
        f"{load:g}x",
        *classes,
        "all",
        "in time/s",
        "utility",
        "Jain: tenants",
        "in class",
        "first retry",
        "inversions",
        "unaccounted",
        "apart",
    ]
    rows = [head, ["---"] * len(head)]
    rows += [
        [
            line.policy,
            *_cells(line.result, classes),
            str(line.unaccounted),
            "-" if line.apart is None else f"{line.apart:.1f}",
        ]
        for line in lines
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cells(result: Result, classes: Sequence[str]) -> list[str]:
    return [
        *(_attained(result.classes[name]) for name in classes),
        _both(result.attained_at_first, result.attained),
        f"{result.goodput:.1f}",
        f"{result.utility:.3f}",
        f"{result.jain_overall:.2f}",
        f"{min(result.jain_in_class.values()):.2f}",
        _first_retry(result),
        str(result.inversions),
    ]


def _attained(one: ClassResult) -> str:
    return _both(one.attained_at_first, one.attained)


def _both(at_first: float, with_returns: float) -> str:
    first, both = f"{at_first * 100:.1f}", f"{with_returns * 100:.1f}"
    return both if first == both else f"{first} / {both}"


def _first_retry(result: Result) -> str:
    share = result.first_retry
    if share is None:
        return "-"
    return f"{share * 100:.1f} % of {result.first_retries}"
