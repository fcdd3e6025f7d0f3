"""Every limit and wait of a client, with its default; the environment says nothing here."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["Options"]


class Options(Struct, frozen=True, kw_only=True):
    """How a client behaves; times of calls in milliseconds, of background work in seconds."""

    timeout_ms: float = 30_000.0
    """A call altogether, with every retry at every selector; to the last byte of the answer."""

    attempt_timeout_ms: float = 2_000.0
    """One attempt: longest silence of a selector that was asked; where something is to be done, to
    the last byte of its answer."""

    selection_timeout_ms: float = 15_000.0
    """The same of a selection. It may wait in the service's queue while the whole fleet is busy,
    and who asks again stands at its end: shorter than the queue is nobody's gain."""

    connect_timeout_ms: float = 1_000.0
    connections_max: int = 100
    """Open connections to each selector; selections that wait hold one each, and what is told of
    the others has one more."""

    answer_bytes_max: int = 64 << 20
    """Bytes of one answer; a longer one is not read to its end (AnswerTooLarge). A selection takes
    some hundred, a hundred thousand workers some 50 MB; `/dump` of a full index is more."""

    attempts_max: int = 3
    """Attempts at one selector, when replies are lost, before the next one is asked."""

    rounds_max: int = 3
    """Rounds over all selectors before a call ends with what the last one said."""

    backoff_ms: float = 25.0
    backoff_max_ms: float = 1_000.0
    """Before the second attempt and at most; doubled each time, a random part of it is waited."""

    lease_ttl_s: float | None = 30.0
    """How long bookings outlive this process; renewed three times in it. None: no leases, and a
    reservation ends five minutes after its last sign of life (the service's setting)."""

    lease_rotate_s: float = 10.0
    """After a reply was lost new bookings go under a new lease, so that the old one can be closed
    once its own are over: what a request that was late has booked goes with it. Not more often."""

    leases_max: int = 8
    """Leases that wait for their last booking; beyond, none is exchanged."""

    batch_window_ms: float = 2.0
    """How long lifecycle calls gather before they are sent together."""

    batch_operations_max: int = 256
    """Lifecycle calls in one request."""

    degraded: bool = True
    """Choose from the last catalog while no selector can be reached."""

    catalog_refresh_s: float = 30.0
    probe_s: float = 0.5
    """While no selector can be reached, one is looked for so often."""

    replays_per_turn_max: int = 32
    """Bookings made again in one go, where a selector does not know them."""

    catalog_workers_max: int = 100_000
    """Workers kept for degraded choices."""

    close_timeout_ms: float = 2_000.0
    """Longest wait for what is still to be told when a client is closed."""

    msgpack: bool = True
    """Bodies in MessagePack, where the service takes them; JSON otherwise."""

    hash_locally: bool = False
    """Send hashes in the place of `token_ids`; needs xxhash. The block size is the catalog's,
    unless the next field gives it."""

    block_size: int | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}")
