"""Plain counters of the HTTP side: requests by route and status, latencies, connections.

Incremented where things happen (`application.py`, `connection_guard.py`) in a fraction of a
microsecond, read by `metrics/exposition.py` at scrape time. Nothing here knows Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from select_service.edge.epp.picker_traffic import PickerTraffic

if TYPE_CHECKING:
    from select_service.core.tenancy.shares import Bound, Shares

LATENCY_BUCKETS_S: Final = (
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    60.0,
)
"""Upper bounds; from a cheap /health to a selection that waits a minute in the queue."""

CLIENT_GONE: Final = 499
"""Counted as the status when the client disconnected before it got one."""


COUNTED_LIMITS: Final = (
    "max_body_bytes",
    "json_depth_max",
    "body_parts_max",
    "body_numbers_max",
    "body_short_bytes_max",
    "body_unknown_bytes_max",
    "body_media_bytes_max",
    "id_length_max",
    "name_length_max",
    "lease_name_length_max",
    "batch_operations_max",
    "batch_samples_max",
)
"""Limits whose refusals are counted as they are answered: of bodies, and of names and numbers in
them."""


class RouteTraffic:
    """The answers of one route."""

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
"""Plain HTTP; a missing or wrong certificate; another TLS version, or not TLS; the client
disconnected; a timeout."""


class Connections:
    """Counters of connections; `open` is read from the server's own set."""

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
        "shares",
        "tenants",
        "unread",
        "unread_bytes",
        "write_timeouts",
    )

    def __init__(self) -> None:
        self.open = 0
        self.accepted = 0
        self.refused = 0  # over --connections-max
        self.refused_by_address = 0  # over --connections-per-address-max
        self.refused_for_descriptors = 0  # would leave less than --descriptors-kept
        self.reserve: dict[object, None] = {}
        """Open connections beyond the limits, oldest first; see `connection_guard.RESERVED_MAX`."""
        self.shares: Shares | None = None
        """What each tenant may hold of bounds; None: no tokens."""
        self.tenants: Bound | None = None
        """Whose the open connections are, but for those beyond the limits."""
        self.handshakes = 0  # TLS, under way
        self.handshakes_failed = dict.fromkeys(HANDSHAKE_FAULTS, 0)
        self.refused_handshakes = 0  # over --tls-handshakes-max
        self.by_address: dict[str, int] = {}  # open TCP connections
        self.header_timeouts = 0
        self.body_timeouts = 0
        self.write_timeouts = 0  # the client did not read its answer
        self.unread = 0  # cut off because of --unread-bytes-max
        self.unread_bytes = 0  # of answers that clients had not read at the last sweep
        self.head_lines = 0  # of the malformed, heads of more than --header-lines-max
        self.malformed = 0  # not HTTP, or a head beyond the limits

    @property
    def reserved(self) -> int:
        """How many connections are open beyond the limits."""
        return len(self.reserve)


class ConsoleTraffic:
    """Clients of the console."""

    __slots__ = ("clients", "dropped", "faults", "refused", "rounds")

    def __init__(self) -> None:
        self.clients = 0  # pages kept up to date
        self.refused = 0  # over --console-clients-max
        self.dropped = 0  # too slow to read their updates
        self.rounds = 0  # updates sent to any page
        self.faults = 0  # updates that failed through a bug


class Traffic:
    """Everything counted at the HTTP side of one application."""

    __slots__ = (
        "connections",
        "console",
        "crashes",
        "epp",
        "in_flight",
        "limit_hits",
        "routes",
        "scrapes",
        "unmatched",
    )

    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], RouteTraffic] = {}  # by (method, pattern)
        self.unmatched = RouteTraffic()  # 404, 405: no pattern to report
        self.connections = Connections()
        self.console = ConsoleTraffic()
        self.epp = PickerTraffic()
        self.in_flight = 0
        self.scrapes = 0  # of these, reads of /metrics
        self.limit_hits = dict.fromkeys(COUNTED_LIMITS, 0)
        self.crashes = 0  # answers 500, and streams cut by a bug

    def refused(self, error: Exception) -> None:
        """Count a refusal by its limit, unless it is counted elsewhere."""
        limit = getattr(error, "limit", None)
        if limit is not None:
            self.limit_hits[limit] += 1

    @property
    def answered(self) -> int:
        """Requests answered so far; O(routes)."""
        every = (*self.routes.values(), self.unmatched)
        return sum(count for route in every for count in route.statuses.values())
