"""The command line of the service as one table; `cli.py` builds its parser from it.

A flag sets the field of Settings with its name. The README's table is compared with this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from indexer.config import EventLossPolicy
from select_service.config.environment import parse_float
from select_service.config.settings import FieldValidation, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FLAGS", "Flag"]

PORT_MAX: Final = 65535
_NO_LIMITS: Final = frozenset({"port", "threads"})


@dataclass(frozen=True, slots=True)
class Flag:
    """One command-line flag; its default is that of the field of Settings with its name."""

    name: str  # as typed, "--port"
    parse: Callable[[str], object] | None  # None: a switch
    metavar: str
    help: str
    watch: str = ""  # the metric that tells how near it is, or how often it was reached

    @property
    def is_limit(self) -> bool:
        """Whether it bounds something: a number, and /metrics shows it as select_service_limit."""
        return self.field not in _NO_LIMITS and type(self.default) in {int, float}

    @property
    def field(self) -> str:
        """The field of Settings it sets."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def default(self) -> object:
        """What holds without the flag."""
        return getattr(Settings(), self.field)

    @property
    def default_text(self) -> str:
        """The same as one would type it."""
        value = self.default
        if isinstance(value, Enum):
            return str(value.value)
        if value is None or value is False:
            return "off"
        return f"{value:g}" if isinstance(value, float) else str(value)


def _whole(minimum: int, maximum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number") from None
        if not minimum <= value <= maximum:
            raise ValueError(f"{value} is not in {minimum}..{maximum}")
        return value

    return parse


def _seconds(*, zero: bool) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = parse_float(text)
        if value is None or value < 0 or (value == 0 and not zero):
            raise ValueError(f"{text!r} is not a number of seconds{'' if zero else ' above 0'}")
        return value

    return parse


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def _member(kind: type[Enum]) -> Callable[[str], Enum]:
    choose = _choice(*(one.value for one in kind))
    return lambda text: kind(choose(text))


_COUNT: Final = (1 << 31) - 1
_BYTES: Final = (1 << 62) - 1
FLAGS: Final = (
    Flag("--host", str, "ADDRESS", "address to listen on"),
    Flag("--port", _whole(0, PORT_MAX), "N", "port to listen on; 0 picks a free one"),
    Flag(
        "--threads",
        _whole(0, _COUNT),
        "N",
        "accepted for compatibility; no effect, one event loop serves everything",
    ),
    Flag(
        "--field-validation",
        _member(FieldValidation),
        "strict|warn|ignore",
        "unknown top-level fields: refuse with 422, answer with a Warning header, say nothing",
    ),
    Flag(
        "--on-event-loss",
        _member(EventLossPolicy),
        "keep|drop",
        "when lost KV events cannot be replayed: keep the rank's known blocks (and mark it"
        " uncertain), or drop them",
    ),
    Flag(
        "--replica-sync-port",
        _whole(1, PORT_MAX),
        "N",
        "publish bookings to replicas on this ZMQ port; without it nothing is published",
    ),
    Flag(
        "--reservation-ttl-s",
        _seconds(zero=True),
        "S",
        "a reservation ends this long after its last lifecycle call; 0 = never",
        watch='reservation_events_total{event="expired"}',
    ),
    Flag(
        "--freed-ids-max",
        _whole(0, _COUNT),
        "N",
        "ids of ended reservations remembered, for ten minutes; ending one again is no error",
        watch="freed_reservation_ids",
    ),
    Flag(
        "--data-parallel-size-max",
        _whole(1, _COUNT),
        "N",
        "most ranks a worker may have, 400 beyond",
        watch="ranks",
    ),
    Flag(
        "--queue-recheck-s",
        _seconds(zero=False),
        "S",
        "waiting requests are looked at again this often, whatever did not happen",
        watch="pending_requests",
    ),
    Flag(
        "--kv-poll-interval-s",
        _seconds(zero=True),
        "S",
        "ask a silent worker's replay endpoint for missed KV events this often; 0 = never",
    ),
    Flag(
        "--kv-polls-max",
        _whole(1, _COUNT),
        "N",
        "replays at one time that only look for missed last events; each takes a socket",
        watch='kv_listeners{state="replaying"}',
    ),
    Flag(
        "--kv-orphan-blocks-max",
        _whole(0, _COUNT),
        "N",
        "blocks of a scope that wait for a parent nobody has announced; the oldest give way",
        watch="index_orphan_blocks",
    ),
    Flag(
        "--replay-timeout-s",
        _seconds(zero=False),
        "S",
        "longest replay of KV events altogether",
        watch='kv_replays_total{outcome="deadline"}',
    ),
    Flag(
        "--replay-silence-s",
        _seconds(zero=False),
        "S",
        "longest wait for the next reply within a replay",
        watch='kv_replays_total{outcome="silent"}',
    ),
    Flag(
        "--replay-attempts-max",
        _whole(1, _COUNT),
        "N",
        "replays in a row that may bring nothing before the missing events count as lost",
        watch="kv_lost_batches_total",
    ),
    Flag(
        "--replay-backoff-s",
        _seconds(zero=False),
        "S",
        "a replay endpoint that failed is left alone for so long, twice as long each time",
        watch="kv_replays_asked_total",
    ),
    Flag(
        "--replay-backoff-max-s",
        _seconds(zero=False),
        "S",
        "and no longer than this",
        watch="kv_replays_asked_total",
    ),
    Flag(
        "--replay-replies-max",
        _whole(1, _COUNT),
        "N",
        "most replies taken from one replay",
        watch='kv_replays_total{outcome="budget"}',
    ),
    Flag(
        "--replay-bytes-max",
        _whole(1, _BYTES),
        "N",
        "most bytes taken from one replay",
        watch='kv_replays_total{outcome="budget"}',
    ),
    Flag(
        "--replay-useless-max",
        _whole(1, _COUNT),
        "N",
        "most replies of one replay that are garbled or out of place",
        watch='kv_replays_total{outcome="garbage"}',
    ),
    Flag(
        "--kv-backlog-batches-max",
        _whole(1, _COUNT),
        "N",
        "live batches of a rank held back while a replay runs; beyond, it is given up",
        watch='kv_replays_total{outcome="backlog_full"}',
    ),
    Flag(
        "--kv-backlog-bytes-max",
        _whole(1, _BYTES),
        "N",
        "bytes of live KV events of a rank held back while a replay runs; beyond, it is given up",
        watch='kv_replays_total{outcome="backlog_full"}',
    ),
    Flag(
        "--kv-message-bytes-max",
        _whole(1, _BYTES),
        "N",
        "longest KV-event message; the connection that sends a longer one is dropped",
        watch="kv_gaps_total",
    ),
    Flag(
        "--kv-receive-messages-max",
        _whole(1, _COUNT),
        "N",
        "KV-event messages queued per rank before they are read",
        watch="kv_gaps_total",
    ),
    Flag(
        "--max-body-bytes",
        _whole(1, _COUNT),
        "N",
        "longest request body, 413 beyond",
        watch='http_requests_total{status="413"}',
    ),
    Flag(
        "--head-bytes-max",
        _whole(1, _COUNT),
        "N",
        "longest request line with its headers, 431 beyond",
        watch='http_connections_cut_total{reason="malformed"}',
    ),
    Flag(
        "--header-timeout-s",
        _seconds(zero=False),
        "S",
        "a connection that has not finished a request head by then is closed (408)",
        watch='http_connections_cut_total{reason="header_timeout"}',
    ),
    Flag(
        "--body-timeout-s",
        _seconds(zero=False),
        "S",
        "the same for a request body, and for a client that does not read its answer",
        watch='http_connections_cut_total{reason=~"(body|write)_timeout"}',
    ),
    Flag(
        "--keep-alive-timeout-s",
        _whole(1, _COUNT),
        "S",
        "an idle connection is closed after this long",
        watch="http_connections",
    ),
    Flag(
        "--connections-max",
        _whole(1, _COUNT),
        "N",
        "open connections, 503 beyond",
        watch="http_connections",
    ),
    Flag(
        "--listen-backlog",
        _whole(1, 65535),
        "N",
        "connections the system holds until they are accepted",
        watch="http_connections_accepted_total",
    ),
    Flag(
        "--shutdown-timeout-s",
        _whole(1, _COUNT),
        "S",
        "how long answers under way may take after SIGTERM or SIGINT",
    ),
    Flag(
        "--metrics-rank-series-max",
        _whole(0, _COUNT),
        "N",
        "ranks with series of their own in /metrics; the rest is only counted",
        watch="ranks_unlisted",
    ),
    Flag(
        "--metrics-scope-series-max",
        _whole(0, _COUNT),
        "N",
        "scopes with series of their own in /metrics; the rest is summed up under `other`",
        watch="scopes_unlisted",
    ),
    Flag("--log-format", _choice("json", "text"), "json|text", "form of the log on stderr"),
    Flag(
        "--log-level",
        _choice("debug", "info", "warning", "error"),
        "debug|info|warning|error",
        "least important record to log",
    ),
    Flag("--access-log", None, "", "log every request"),
)
