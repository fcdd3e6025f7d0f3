"""Plain counters of the HTTP side: requests by route and status, latencies, connections.

Counted where it happens (`asgi.py`, `protocol.py`) for a fraction of a microsecond, read by
`metrics/exposition.py` at scrape time. Nothing here knows Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import Final

__all__ = [
    "CLIENT_GONE",
    "LATENCY_BUCKETS_S",
    "Connections",
    "ConsoleTraffic",
    "RouteTraffic",
    "Traffic",
]

LATENCY_BUCKETS_S: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0),
)
"""Upper bounds; from a cheap /health to a selection that waits a minute in the queue."""

CLIENT_GONE: Final = 499
"""Counted in place of a status when the client left before it got one."""


COUNTED_LIMITS: Final = (
    *("max_body_bytes", "json_depth_max", "body_parts_max", "body_numbers_max"),
    *("body_short_bytes_max", "body_unknown_bytes_max", "body_media_bytes_max"),
    *("id_length_max", "name_length_max", "lease_name_length_max"),
    *("batch_operations_max", "wave_samples_max"),
)
"""Limits whose refusals are counted as they are answered: of bodies, names and numbers in them."""


class RouteTraffic:
    """What one route has answered."""

    __slots__ = ("buckets", "seconds", "statuses")

    def __init__(self) -> None:
        self.statuses: defaultdict[int, int] = defaultdict(int)
        self.buckets = [0] * (len(LATENCY_BUCKETS_S) + 1)  # not cumulative; the last is +Inf
        self.seconds = 0.0

    def observe(self, status: int, seconds: float) -> None:
        """Count one answer."""
        self.statuses[status] += 1
        self.buckets[bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
        self.seconds += seconds


HANDSHAKE_FAULTS: Final = ("plain", "certificate", "protocol", "gone", "timeout")
"""No TLS but HTTP; none or a wrong certificate; another version, or no TLS at all; the client left;
it took too long."""


class Connections:
    """What became of connections; `open` is read from the server's own set."""

    __slots__ = (
        "accepted",
        "body_timeouts",
        "by_address",
        "handshakes",
        "handshakes_failed",
        "head_lines",
        "header_timeouts",
        "malformed",
        "open",
        "refused",
        "refused_by_address",
        "refused_for_descriptors",
        "refused_handshakes",
        "reserve",
        "unread",
        "unread_bytes",
        "write_timeouts",
    )

    def __init__(self) -> None:
        self.open = 0
        self.accepted = 0
        self.refused = 0  # over --connections-max
        self.refused_by_address = 0  # over --connections-per-address-max
        self.refused_for_descriptors = 0  # they would have left less than --descriptors-kept
        self.reserve: dict[object, None] = {}
        """Of those open, the ones beyond the limits, oldest first; see `protocol.RESERVED_MAX`."""
        self.handshakes = 0  # TLS, under way
        self.handshakes_failed = dict.fromkeys(HANDSHAKE_FAULTS, 0)
        self.refused_handshakes = 0  # over --tls-handshakes-max
        self.by_address: dict[str, int] = {}  # open, of those that come by TCP
        self.header_timeouts = 0
        self.body_timeouts = 0
        self.write_timeouts = 0  # the client did not read its answer
        self.unread = 0  # cut off for --unread-bytes-max
        self.unread_bytes = 0  # of answers that clients had yet to read, when last looked
        self.head_lines = 0  # of the malformed, heads of more than --header-lines-max
        self.malformed = 0  # not HTTP, or a head beyond the limit

    @property
    def reserved(self) -> int:
        """How many are open beyond the limits."""
        return len(self.reserve)


class ConsoleTraffic:
    """Who looks at the console."""

    __slots__ = ("clients", "dropped", "faults", "refused", "rounds")

    def __init__(self) -> None:
        self.clients = 0  # pages kept up to date
        self.refused = 0  # over --console-clients-max
        self.dropped = 0  # they did not read what they were sent
        self.rounds = 0  # times somebody was told what is new
        self.faults = 0  # rounds that failed by our error


class Traffic:
    """Everything counted at the HTTP door of one app."""

    __slots__ = (
        *("connections", "console", "crashes", "in_flight", "limit_hits", "routes", "scrapes"),
        "unmatched",
    )

    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], RouteTraffic] = {}  # by (method, pattern)
        self.unmatched = RouteTraffic()  # 404, 405: no pattern to name
        self.connections = Connections()
        self.console = ConsoleTraffic()
        self.in_flight = 0
        self.scrapes = 0  # of them, those that read these numbers
        self.limit_hits = dict.fromkeys(COUNTED_LIMITS, 0)
        self.crashes = 0  # answers 500, and streams cut by an error of ours

    def refused(self, error: Exception) -> None:
        """Count what a refusal was for, where nobody else does."""
        limit = getattr(error, "limit", None)
        if limit is not None:
            self.limit_hits[limit] += 1

    @property
    def answered(self) -> int:
        """Requests answered so far; O(routes)."""
        every = (*self.routes.values(), self.unmatched)
        return sum(count for route in every for count in route.statuses.values())
