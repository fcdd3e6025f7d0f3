"""All limits and waits of a client, with their defaults; none is read from the environment.

Both clients take them; `attempts.py`, `lease_book.py` and `upkeep.py` obey them.
"""

from __future__ import annotations

from typing import Any, Final, Self

from msgspec import Struct

_NEVER_S: Final = 1e9


class Options(Struct, frozen=True, kw_only=True):
    """How a client behaves; times of calls in milliseconds, of background work in seconds."""

    timeout_ms: float = 30_000.0
    """Total time of a call, with every retry at every selector, to the last byte of the answer."""

    attempt_timeout_ms: float = 2_000.0
    """Time of one attempt: the selector's longest silence; for requests that change something,
    until the last byte of the answer."""

    selection_timeout_ms: float = 15_000.0
    """The same for a selection. It may wait in the service's queue while the whole fleet is busy,
    and a retry starts at the queue's end, so a timeout shorter than the queue is of no use."""

    connect_timeout_ms: float = 1_000.0
    connections_max: int = 100
    """Open connections to each selector. Waiting selections hold one each; background work has one
    more."""

    answer_bytes_max: int = 64 << 20
    """Bytes of one answer; a longer one is not read to its end (AnswerTooLarge). A selection takes
    some hundred, a hundred thousand workers some 50 MB; `/dump` of a full index is more."""

    attempts_max: int = 3
    """Attempts at one selector, if replies are lost, before the next one is asked."""

    retry_refused: bool = True
    """Ask again, within the call's time, when the service refuses for load and says when to come
    again (429, 503). False: the refusal is raised once every selector was asked that may know
    better, for callers that pass it on."""

    rounds_max: int = 3
    """Rounds over all selectors before a call ends with the last outcome."""

    backoff_ms: float = 25.0
    backoff_max_ms: float = 1_000.0
    """Wait before the second attempt, and its maximum; doubles each time, randomised."""

    lease_ttl_s: float | None = 30.0
    """How long bookings outlive this process; renewed three times within it. None: no leases, and a
    reservation ends five minutes after its last sign of life (the service's setting)."""

    lease_rotate_s: float = 10.0
    """After a reply was lost new bookings go under a new lease, so that the old one can be closed
    once its own bookings are over, with whatever a late request has booked. At most this often."""

    leases_max: int = 8
    """Old leases that may wait for their last booking; beyond it, leases are not replaced."""

    batch_window_ms: float = 2.0
    """How long lifecycle calls are collected before they are sent together."""

    batch_operations_max: int = 256
    """Lifecycle calls per request."""

    degraded: bool = True
    """Choose from the last catalog while no selector can be reached."""

    catalog_refresh_s: float = 30.0
    probe_s: float = 0.5
    """Interval at which selectors are probed while none can be reached."""

    replays_per_turn_max: int = 32
    """Bookings made again in one turn at a selector that does not know them."""

    catalog_workers_max: int = 100_000
    """Workers kept for degraded choices."""

    close_timeout_ms: float = 2_000.0
    """Longest wait for pending lifecycle calls when a client is closed."""

    msgpack: bool = True
    """Send bodies in MessagePack where the service accepts it; otherwise JSON."""

    hash_locally: bool = False
    """Send hashes instead of `token_ids`; needs xxhash. The block size comes from the catalog,
    unless the next field gives it."""

    block_size: int | None = None

    @classmethod
    def single_attempt(cls, timeout_s: float, **fields: Any) -> Self:
        """Return options for a program that only asks: one attempt, and nothing in the background.

        A selector that says when to come again is asked again, within the timeout.

        Args:
            timeout_s: seconds of a call, to connect and to the last byte of the answer.
            fields: the other options.
        """
        wait_ms = timeout_s * 1e3
        alone: dict[str, Any] = {
            "timeout_ms": wait_ms,
            "attempt_timeout_ms": wait_ms,
            "selection_timeout_ms": wait_ms,
            "connect_timeout_ms": wait_ms,
            "attempts_max": 1,
            "rounds_max": 1,
            "lease_ttl_s": None,
            "degraded": False,
            "probe_s": _NEVER_S,
        }
        return cls(**alone | fields)

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}")
