"""Metrics of the endpoint picker, which gateways ask over gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.metric_rows import MetricRow, Sum, summary, table, total, value

if TYPE_CHECKING:
    from select_service.edge.epp.picker_traffic import PickerTraffic
    from select_service.metric_rows import Collector

_ROWS: Final[tuple[MetricRow[PickerTraffic], ...]] = (
    value(
        "epp_streams",
        "Open streams of gateways, one for each of their requests.",
        lambda traffic: traffic.streams,
    ),
    total("epp_streams_opened", "Streams of gateways opened.", lambda traffic: traffic.opened),
    total(
        "epp_streams_broken",
        "Streams that ended before the response they belong to.",
        lambda traffic: traffic.broken,
    ),
    total("epp_chosen", "Requests that got an endpoint.", lambda traffic: traffic.chosen),
    total(
        "epp_refused",
        "Requests that gateways were to refuse, by status.",
        lambda traffic: {str(status): count for status, count in traffic.refused.items()},
        "status",
    ),
    total(
        "epp_crashes",
        "Streams that failed through an error of ours.",
        lambda traffic: traffic.crashes,
    ),
    total(
        "epp_prompts",
        "Prompts by where their tokens came from.",
        lambda traffic: traffic.prompts,
        "source",
    ),
    total(
        "epp_load_alone",
        "Prompts without tokens, which were placed by load alone, by reason.",
        lambda traffic: traffic.load_alone,
        "reason",
    ),
    summary(
        "epp_tokenize_seconds",
        "Time that engines took to tokenize prompts, failures included.",
        lambda traffic: Sum(traffic.tokenize_calls, traffic.tokenize_seconds),
    ),
    value(
        "epp_tokenize_cache_bytes",
        "Memory of tokens that engines have answered.",
        lambda traffic: traffic.cache_bytes,
    ),
    value(
        "epp_buffered_bytes",
        "Request bodies that wait for their end or for a choice.",
        lambda traffic: traffic.buffered_bytes,
    ),
    total(
        "epp_served",
        "Endpoints that gateways named as those that served: the chosen one, another worker, to "
        "which the reservation moved, or an unknown one.",
        lambda traffic: traffic.served,
        "endpoint",
    ),
    total(
        "epp_reservations_lost",
        "Reservations that had ended before their stream.",
        lambda traffic: traffic.lost,
    ),
)


def epp_table(traffic: PickerTraffic) -> Collector:
    """Return the endpoint picker; zero without `--epp-port`."""
    return table(_ROWS, lambda: traffic)
