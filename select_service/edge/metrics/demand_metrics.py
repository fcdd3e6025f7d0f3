"""Demand per scope, for capacity planning; see `core/ledger/demand_tally.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.edge.metrics.scope_series import REST, SCOPE, by_scope
from select_service.metric_rows import (
    Buckets,
    MetricRow,
    MetricTable,
    Sum,
    histogram,
    paced,
    summary,
    total,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.core.ledger.demand_tally import DemandTally, UnservedDemand
    from select_service.core.partition import Partition
    from select_service.edge.metrics.scope_series import ScopeGroups, Sources
    from select_service.metric_rows import Collector

_SIZE_MIN, _SIZE_MAX = 5, 21
"""Bit lengths: buckets from 31 to two million tokens; what is longer is in the last, open one."""
_BOUNDS: Final = tuple((1 << size) - 1 for size in range(_SIZE_MIN, _SIZE_MAX + 1))

_REQUESTS: Final[tuple[MetricRow[Mapping[str, int]], ...]] = (
    total(
        "demand_requests",
        "Requests for a worker; those refused are demand, too. UnservedDemand: there was none.",
        lambda counts: counts,
        "outcome",
    ),
)

_DEMAND: Final[tuple[MetricRow[DemandTally], ...]] = (
    histogram(
        "demand_isl_tokens",
        "Prompt lengths of requests placed.",
        lambda tally: Buckets(_BOUNDS, _by_size(tally.isl_counts), tally.isl_tokens),
    ),
    summary(
        "demand_prefill_tokens",
        "Prompt tokens the worker chosen had to compute, of requests placed.",
        lambda tally: Sum(sum(tally.isl_counts), tally.prefill_tokens),
    ),
    summary(
        "demand_output_tokens",
        "Tokens of answers, by the output blocks reported, of ended requests.",
        lambda tally: Sum(tally.answered, tally.output_tokens),
    ),
    summary(
        "demand_ttft_seconds",
        "From the reservation of a request to the end of its prefill.",
        lambda tally: Sum(tally.first_tokens, tally.ttft_s),
    ),
    summary(
        "demand_itl_seconds",
        "From the end of the prefill to the end of the request, per token.",
        lambda tally: Sum(tally.answering_tokens, tally.answering_s),
    ),
    summary(
        "demand_request_seconds",
        "From the reservation of a request to its end.",
        lambda tally: Sum(tally.ended, tally.request_s),
    ),
)


def demand_tables(groups: ScopeGroups, unserved: UnservedDemand) -> tuple[Collector, ...]:
    """Return requests, lengths and times by scope."""
    served = by_scope(groups, _requests)

    def requests() -> Sources[Mapping[str, int]]:
        yield from served()
        elsewhere = unserved.elsewhere
        for row in paced(unserved.rows()):
            if row is None:
                yield None
            elif row[0] == REST:  # a series must not come twice
                elsewhere += row[1]
            else:
                yield row[0], ({"unserved": row[1]},)
        if elsewhere:
            yield REST, ({"unserved": elsewhere},)

    return (
        MetricTable(_REQUESTS, requests, SCOPE),
        MetricTable(_DEMAND, by_scope(groups, lambda one: one.demand), SCOPE),
    )


def _requests(partition: Partition) -> dict[str, int]:
    return {"placed": sum(partition.demand.isl_counts), "refused": partition.demand.refused}


def _by_size(counts: list[int]) -> list[int]:
    """Return counts by bit length in classes between the bounds."""
    return [
        sum(counts[: _SIZE_MIN + 1]),
        *counts[_SIZE_MIN + 1 : _SIZE_MAX + 1],
        sum(counts[_SIZE_MAX + 1 :]),
    ]
