"""Metrics of requests, connections and the console, read at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import Metric
from typing_extensions import override

from select_service.edge.http.traffic import LATENCY_BUCKETS_S
from select_service.edge.metrics.families import Collector, counter, gauge, histogram

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.edge.http.traffic import RouteTraffic, Traffic
    from select_service.edge.metrics.families import Steps

__all__ = ["HttpMetrics"]

UNMATCHED: Final = ("other", "other")  # method and route of requests without a route


class HttpMetrics(Collector):
    """Requests and connections."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    @override
    def collect(self) -> Steps:
        labels = ("method", "route")
        requests = counter("http_requests", "Requests answered.", (*labels, "status"))
        latency = histogram(
            "http_request_duration_seconds",
            "From the end of the request head to the answer, waiting in the queue included.",
            labels,
        )
        for names, stats in self._routes():
            for status, count in sorted(stats.statuses.items()):
                requests.add_metric([*names, str(status)], count)
            if stats.statuses:
                latency.add_metric(names, _cumulated(stats), stats.seconds)
            yield None
        yield requests
        yield latency
        yield from self._connections()

    def _routes(self) -> Iterator[tuple[tuple[str, str], RouteTraffic]]:
        yield from list(self._traffic.routes.items())
        yield UNMATCHED, self._traffic.unmatched

    def _connections(self) -> Iterator[Metric]:
        counts = self._traffic.connections
        yield gauge(
            "http_requests_in_flight",
            "Requests in progress or waiting, except scrapes.",
            value=self._traffic.in_flight - self._traffic.scrapes,
        )
        yield counter(
            "http_crashes",
            "Requests that failed through an error of ours.",
            value=self._traffic.crashes,
        )
        yield gauge("http_connections", "Open connections.", value=counts.open)
        yield gauge(
            "http_unread_bytes",
            "Bytes of answers that clients have yet to read.",
            value=counts.unread_bytes,
        )
        yield gauge("tls_handshakes", "TLS handshakes under way.", value=counts.handshakes)
        failed = counter(
            "tls_handshakes_failed", "TLS handshakes that failed, by reason.", ("reason",)
        )
        for reason, count in counts.handshakes_failed.items():
            failed.add_metric([reason], count)
        yield failed
        yield counter("http_connections_accepted", "Connections accepted.", value=counts.accepted)
        yield from self._console()
        cut = counter("http_connections_cut", "Connections closed for a fault.", ("reason",))
        for reason in (
            "refused",
            "header_timeouts",
            "body_timeouts",
            "write_timeouts",
            "unread",
            "malformed",
        ):
            cut.add_metric([reason.removesuffix("s")], getattr(counts, reason))
        yield cut

    def _console(self) -> Iterator[Metric]:
        counts = self._traffic.console
        yield gauge(
            "console_clients", "Pages of the console kept up to date.", value=counts.clients
        )
        ended = counter("console_clients_ended", "Pages sent away, by reason.", ("reason",))
        ended.add_metric(["refused"], counts.refused)
        ended.add_metric(["slow"], counts.dropped)
        yield ended
        rounds = counter("console_rounds", "Times the console was told what is new.", ("outcome",))
        rounds.add_metric(["told"], counts.rounds)
        rounds.add_metric(["fault"], counts.faults)
        yield rounds


def _cumulated(stats: RouteTraffic) -> list[tuple[str, float]]:
    bounds = [*map(str, LATENCY_BUCKETS_S), "+Inf"]
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip(bounds, stats.buckets, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
