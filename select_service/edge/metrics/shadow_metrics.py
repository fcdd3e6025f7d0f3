"""Metrics of shadow weights, read from counters at scrape time."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import (
    Metric,
)
from typing_extensions import override

from select_service.core.decisions.shadow_regret import ShadowTally
from select_service.edge.metrics.families import (
    SCOPE,
    Collector,
    counter,
    gauge,
    histogram,
    paced,
)
from select_service.types.shadow import REGRET_BOUNDS

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from indexer.types import Scope
    from select_service.core.decisions.shadow_regret import RegretTally
    from select_service.edge.driver.driver import Driver
    from select_service.edge.metrics.families import Steps
    from select_service.edge.metrics.scope_series import ScopeGroups

_BOUNDS: Final = (*map(str, REGRET_BOUNDS), "+Inf")
_SIDES: Final = ("live", "shadow")
_CHOSEN: Final = (
    ("prefill_tokens", "Prompt tokens the rank chosen would have to compute."),
    ("cached_tokens", "Prompt tokens the rank chosen holds."),
    ("queued_prefill_tokens", "Prefill tokens of others queued on the rank chosen."),
    ("decode_blocks", "Decode blocks of the rank chosen, with the prompt's."),
)


class ShadowMetrics(Collector):
    """Of scopes, as many as have series of their own; none without a shadow."""

    def __init__(self, service: Driver, groups: ScopeGroups) -> None:
        self._service = service
        self._groups = groups

    @override
    def collect(self) -> Steps:
        shadowing = self._service.core.shadowing
        weight = gauge("shadow_weight", "Shadow weights in force.", ("name",))
        if shadowing.shadow is not None:
            for name, value in shadowing.shadow.weights._asdict().items():
                weight.add_metric([name], value)
        yield weight
        yield counter(
            "shadow_cost_seconds",
            "Time spent on scoring with shadow weights.",
            value=shadowing.budget.spent_s,
        )
        tallies = [] if shadowing.shadow is None else (yield from self._tallies())
        yield from self._counts(tallies)
        yield from self._regret(tallies)
        yield from self._chosen(tallies)

    def _tallies(self) -> Generator[None, None, list[tuple[Scope, ShadowTally]]]:
        told = []
        for scope, partitions, _ in self._groups.found:
            tally = ShadowTally()
            for partition in paced(partitions):
                if partition is None:
                    yield None
                elif partition.shadow_tally is not None:
                    tally.add(partition.shadow_tally)
            told.append((scope, tally))
            yield None
        return told

    def _counts(self, tallies: list[tuple[Scope, ShadowTally]]) -> Iterator[Metric]:
        scored = counter(
            "shadow_decisions", "Decisions that shadow weights scored.", ("outcome", *SCOPE)
        )
        skipped = counter(
            "shadow_skipped",
            "Decisions that shadow weights did not score, by reason.",
            ("reason", *SCOPE),
        )
        for scope, tally in tallies:
            scored.add_metric(["agreed", *scope], tally.agreed)
            scored.add_metric(["differed", *scope], tally.scored - tally.agreed)
            for reason, count in sorted(tally.skipped.items()):
                skipped.add_metric([reason, *scope], count)
        yield scored
        yield skipped

    def _regret(self, tallies: list[tuple[Scope, ShadowTally]]) -> Steps:
        family = histogram(
            "shadow_regret_blocks",
            "What the other side's choice costs more, by the weights of one side.",
            ("weights", *SCOPE),
        )
        for scope, tally in tallies:
            for side, regret in zip(_SIDES, (tally.regret_live, tally.regret_shadow), strict=True):
                if tally.scored:
                    family.add_metric([side, *scope], _cumulated(regret), regret.total)
            yield None
        yield family

    def _chosen(self, tallies: list[tuple[Scope, ShadowTally]]) -> Iterator[Metric]:
        for name, text in _CHOSEN:
            what = f"{text} Of decisions scored, by whose choice it is."
            family = counter(f"shadow_chosen_{name}", what, ("choice", *SCOPE))
            for scope, tally in tallies:
                for side, sums in zip(_SIDES, (tally.live, tally.shadow), strict=True):
                    family.add_metric([side, *scope], getattr(sums, name))
            yield family


def _cumulated(regret: RegretTally) -> list[tuple[str, float]]:
    return list(zip(_BOUNDS, accumulate(regret.counts), strict=True))
