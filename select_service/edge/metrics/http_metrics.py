"""Metrics of requests, connections and the console."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.edge.http.traffic import LATENCY_BUCKETS_S
from select_service.metric_rows import (
    Buckets,
    MetricRow,
    MetricTable,
    histogram,
    table,
    total,
    value,
)

if TYPE_CHECKING:
    from select_service.edge.http.traffic import RouteTraffic, Traffic
    from select_service.edge.metrics.scope_series import Sources
    from select_service.metric_rows import Collector

_UNMATCHED: Final = ("other", "other")  # method and route of requests without a route
_ROUTE: Final = ("method", "route")
_CUT: Final = (
    "refused",
    "header_timeouts",
    "body_timeouts",
    "write_timeouts",
    "unread",
    "malformed",
)

_ROUTES: Final[tuple[MetricRow[RouteTraffic], ...]] = (
    total(
        "http_requests",
        "Requests answered.",
        lambda stats: {str(status): count for status, count in stats.statuses.items()},
        "status",
    ),
    histogram(
        "http_request_duration_seconds",
        "From the end of the request head to the answer, waiting in the queue included.",
        lambda stats: (
            Buckets(LATENCY_BUCKETS_S, stats.buckets, stats.seconds) if stats.statuses else None
        ),
    ),
)

_TRAFFIC: Final[tuple[MetricRow[Traffic], ...]] = (
    value(
        "http_requests_in_flight",
        "Requests in progress or waiting, except scrapes.",
        lambda traffic: traffic.in_flight - traffic.scrapes,
    ),
    total(
        "http_crashes",
        "Requests that failed through an error of ours.",
        lambda traffic: traffic.crashes,
    ),
    value("http_connections", "Open connections.", lambda traffic: traffic.connections.open),
    value(
        "http_unread_bytes",
        "Bytes of answers that clients have yet to read.",
        lambda traffic: traffic.connections.unread_bytes,
    ),
    value(
        "tls_handshakes",
        "TLS handshakes under way.",
        lambda traffic: traffic.connections.handshakes,
    ),
    total(
        "tls_handshakes_failed",
        "TLS handshakes that failed, by reason.",
        lambda traffic: traffic.connections.handshakes_failed,
        "reason",
    ),
    total(
        "http_connections_accepted",
        "Connections accepted.",
        lambda traffic: traffic.connections.accepted,
    ),
    value(
        "console_clients",
        "Pages of the console kept up to date.",
        lambda traffic: traffic.console.clients,
    ),
    total(
        "console_clients_ended",
        "Pages sent away, by reason.",
        lambda traffic: {"refused": traffic.console.refused, "slow": traffic.console.dropped},
        "reason",
    ),
    total(
        "console_rounds",
        "Times the console was sent what is new.",
        lambda traffic: {"told": traffic.console.rounds, "fault": traffic.console.faults},
        "outcome",
    ),
    total(
        "http_connections_cut",
        "Connections closed for a fault.",
        lambda traffic: {
            name.removesuffix("s"): getattr(traffic.connections, name) for name in _CUT
        },
        "reason",
    ),
)


def http_tables(traffic: Traffic) -> tuple[Collector, ...]:
    """Return requests by route, then connections and the console."""

    def routes() -> Sources[RouteTraffic]:
        for names, stats in [*traffic.routes.items(), (_UNMATCHED, traffic.unmatched)]:
            yield names, (stats,)
            yield None

    return MetricTable(_ROUTES, routes, _ROUTE), table(_TRAFFIC, lambda: traffic)
