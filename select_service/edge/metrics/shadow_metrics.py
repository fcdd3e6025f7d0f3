"""Metrics of shadow weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.core.decisions.shadow_regret import ShadowTally
from select_service.edge.metrics.scope_series import SCOPE
from select_service.metric_rows import (
    Buckets,
    MetricRow,
    MetricTable,
    histogram,
    paced,
    table,
    total,
    value,
)
from select_service.types.shadow import REGRET_BOUNDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.decisions.shadow_regret import RegretTally
    from select_service.core.partition import Partition
    from select_service.core.service import SelectionCore
    from select_service.edge.driver.driver import Driver
    from select_service.edge.metrics.scope_series import ScopeGroups, Sources
    from select_service.metric_rows import Collector


def _weights(core: SelectionCore) -> dict[str, float]:
    shadow = core.shadow_control.shadow
    return {} if shadow is None else shadow.weights._asdict()


def _chosen(name: str, text: str) -> MetricRow[ShadowTally]:
    """Return the row of what the ranks have that the live weights, and the shadow's, chose."""
    return total(
        f"shadow_chosen_{name}",
        f"{text} Of decisions scored, by whose choice it is.",
        lambda tally: {"live": getattr(tally.live, name), "shadow": getattr(tally.shadow, name)},
        "choice",
    )


_SHADOW: Final[tuple[MetricRow[SelectionCore], ...]] = (
    value("shadow_weight", "Shadow weights in force.", _weights, "name"),
    total(
        "shadow_cost_seconds",
        "Time spent on scoring with shadow weights.",
        lambda core: core.shadow_control.budget.spent_s,
    ),
)

_DECISIONS: Final[tuple[MetricRow[ShadowTally], ...]] = (
    total(
        "shadow_decisions",
        "Decisions that shadow weights scored.",
        lambda tally: {"agreed": tally.agreed, "differed": tally.scored - tally.agreed},
        "outcome",
    ),
    total(
        "shadow_skipped",
        "Decisions that shadow weights did not score, by reason.",
        lambda tally: tally.skipped,
        "reason",
    ),
    histogram(
        "shadow_regret_blocks",
        "What the other side's choice costs more, by the weights of one side.",
        lambda tally: (
            {"live": _buckets(tally.regret_live), "shadow": _buckets(tally.regret_shadow)}
            if tally.scored
            else None
        ),
        "weights",
    ),
    _chosen("prefill_tokens", "Prompt tokens the rank chosen would have to compute."),
    _chosen("cached_tokens", "Prompt tokens the rank chosen holds."),
    _chosen("queued_prefill_tokens", "Prefill tokens of others queued on the rank chosen."),
    _chosen("decode_blocks", "Decode blocks of the rank chosen, with the prompt's."),
)


def shadow_tables(driver: Driver, groups: ScopeGroups) -> tuple[Collector, ...]:
    """Return the shadow, and its decisions by scope; none without a shadow."""
    core = driver.core

    def by_scope() -> Sources[ShadowTally]:
        if core.shadow_control.shadow is not None:
            for group in groups.found:
                yield group.scope, _tally(group.partitions)
                yield None

    return table(_SHADOW, lambda: core), MetricTable(_DECISIONS, by_scope, SCOPE, own_first=True)


def _tally(partitions: list[Partition]) -> Iterator[ShadowTally | None]:
    """Yield None between steps, then the sum, also if no partition has one."""
    tally = ShadowTally()
    for one in paced(partitions):
        if one is None:
            yield None
        elif one.shadow_tally is not None:
            tally.add(one.shadow_tally)
    yield tally


def _buckets(regret: RegretTally) -> Buckets:
    return Buckets(REGRET_BOUNDS, regret.counts, regret.total)
