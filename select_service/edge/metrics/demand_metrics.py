"""Demand per scope, for capacity planning; see `core/ledger/demand_tally.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from select_service.core.ledger.demand_tally import DemandTally
from select_service.edge.metrics.families import (
    SCOPE,
    Collector,
    counter,
    histogram,
    paced,
    summary,
)
from select_service.edge.metrics.scope_series import REST, totals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.core.ledger.unserved_demand import UnservedDemand
    from select_service.core.partition import Partition
    from select_service.edge.metrics.families import Steps
    from select_service.edge.metrics.scope_series import ScopeGroups

__all__ = ["DemandMetrics"]

_SIZES: Final = range(5, 22)
"""Buckets from 31 to two million tokens; what is longer is in the last, open one."""

_SUMMARIES: Final[tuple[tuple[str, str, Callable[[DemandTally], tuple[int, float]]], ...]] = (
    (
        "prefill_tokens",
        "Prompt tokens the worker chosen had to compute, of requests placed.",
        lambda tally: (sum(tally.isl_counts), tally.prefill_tokens),
    ),
    (
        "output_tokens",
        "Tokens of answers, by the output blocks told, of ended requests.",
        lambda tally: (tally.answered, tally.output_tokens),
    ),
    (
        "ttft_seconds",
        "From the booking of a request to the end of its prefill.",
        lambda tally: (tally.first_tokens, tally.ttft_s),
    ),
    (
        "itl_seconds",
        "From the end of the prefill to the end of the request, per token.",
        lambda tally: (tally.answering_tokens, tally.answering_s),
    ),
    (
        "request_seconds",
        "From the booking of a request to its end.",
        lambda tally: (tally.ended, tally.request_s),
    ),
)


class DemandMetrics(Collector):
    """Requests, lengths and times by scope."""

    def __init__(self, groups: ScopeGroups, unserved: UnservedDemand) -> None:
        self._groups, self._unserved = groups, unserved

    @override
    def collect(self) -> Steps:
        requests = counter(
            "demand_requests",
            "Requests for a worker; those refused are demand, too. UnservedDemand: there was none.",
            (*SCOPE, "outcome"),
        )
        for scope, partitions, _ in self._groups.found:
            placed, refused = yield from totals(
                partitions, lambda one: (sum(one.demand.isl_counts), one.demand.refused)
            )
            requests.add_metric([*scope, "placed"], placed)
            requests.add_metric([*scope, "refused"], refused)
            yield None
        elsewhere = self._unserved.elsewhere
        for row in paced(self._unserved.rows()):
            if row is None:
                yield None
            elif row[0] == REST:  # a series must not come twice
                elsewhere += row[1]
            else:
                requests.add_metric([*row[0], "unserved"], row[1])
        if elsewhere:
            requests.add_metric([*REST, "unserved"], elsewhere)
        yield requests
        yield from self._lengths()
        for name, text, read in _SUMMARIES:
            family = summary(f"demand_{name}", text, SCOPE)
            for scope, partitions, _ in self._groups.found:
                count, total = yield from totals(partitions, partial(_read, read))
                family.add_metric(scope, count_value=int(count), sum_value=total)
                yield None
            yield family

    def _lengths(self) -> Steps:
        family = histogram("demand_isl_tokens", "Prompt lengths of requests placed.", SCOPE)
        for scope, partitions, _ in self._groups.found:
            tokens, *counts = yield from totals(
                partitions, lambda one: (one.demand.isl_tokens, *one.demand.isl_counts)
            )
            family.add_metric(scope, _cumulated(counts), tokens)
            yield None
        yield family


def _read(
    read: Callable[[DemandTally], tuple[int, float]], partition: Partition
) -> tuple[int, float]:
    return read(partition.demand)


def _cumulated(counts: Sequence[float]) -> list[tuple[str, float]]:
    buckets = [(str((1 << size) - 1), float(sum(counts[: size + 1]))) for size in _SIZES]
    return [*buckets, ("+Inf", float(sum(counts)))]
