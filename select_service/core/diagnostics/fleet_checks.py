"""Faults visible without events: in records, endpoints, replicas, and the behaviour of callers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from indexer.compiled import kernels_text, unwanted
from indexer.types import Tier
from select_service.core.diagnostics import causes
from select_service.core.diagnostics.growth import CounterGrowth
from select_service.types.doctor import Subject

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from indexer.core.index import KvIndex
    from indexer.types import WorkerRank
    from select_service.core.counters import Counters, ReplicaCounters
    from select_service.core.diagnostics.causes import Cause
    from select_service.core.fleet.catalog import Worker
    from select_service.core.routing.read import RequestReader
    from select_service.types import ReplicaStatus
    from select_service.types.doctor import PeerLink, SourceLink

STRAYED_MIN: Final = 5
"""Requests for a model without workers within the window that are no slip of somebody's hand."""

EXPIRED_MIN: Final = 10
"""Reservations that were not freed, within the window, and more than were freed."""

EARLY_MIN: Final = 3
"""Reservations within the window that were spoken of after they had expired: no late repeat."""

SET_S: Final = 5.0
"""From one examination to the next clocks drift by far less; NTP sets what is off by more."""

CLOCK_SET_SHOWN_S: Final = 120.0
"""For how long it is reported that the clock was set."""

COPIES_ROOM_FACTOR: Final = 1.25
"""As many times as many blocks as a rank has room for are no removals under way."""

NAMED_MAX: Final = 8
"""Pods named in one finding."""

Suspect = tuple["Cause", Subject, str]


class EndpointOwners:
    """Which worker names which endpoint; two servers cannot share one."""

    def __init__(self) -> None:
        self._events: dict[str, tuple[WorkerRank, str | None]] = {}
        self._replays: dict[str, tuple[WorkerRank, str | None]] = {}

    def name(
        self, rank: WorkerRank, server: str | None, endpoint: str, replay: str | None
    ) -> str | None:
        """Note a rank's endpoints; return what is wrong about them.

        Ranks of one server may share: some engines have one publisher for all.
        """
        for kind, known, named in (
            ("KV-event", self._events, endpoint),
            ("replay", self._replays, replay),
        ):
            if named is None:
                continue
            other, its_server = known.setdefault(named, (rank, server))
            if other.worker_id != rank.worker_id and its_server != server:
                return f"worker {other.worker_id} names the same {kind} endpoint, {named}"
        return None


def server_of(endpoint: str) -> str:
    """Return what of an endpoint names the server: one may serve several models by path."""
    scheme, mark, rest = endpoint.partition("://")
    return f"{scheme}{mark}{rest.partition('/')[0]}" if mark else endpoint


def look_at_worker(worker: Worker) -> Suspect | None:
    """Name what keeps a worker from being scheduled."""
    if worker.lifecycle != "incomplete":
        return None
    subject = Subject(
        model_name=worker.scope.model_name,
        tenant_id=worker.scope.tenant_id,
        worker_id=worker.worker_id,
    )
    return causes.WORKER_INCOMPLETE, subject, "; ".join(worker.reasons)


def copies_beyond_room(index: KvIndex, rank: WorkerRank, room: int | None) -> str | None:
    """Say that a rank's events announced more blocks than it has room for, some more than once."""
    if not room or index.slot_of(rank) is None:
        return None
    holder = index.holder(rank)
    announced, held = holder.references(Tier.DEVICE), holder.blocks[Tier.DEVICE]
    if announced <= COPIES_ROOM_FACTOR * room or announced == held:
        return None
    return f"{announced} blocks, {announced - held} of them again, where it has room for {room}"


def look_at_kernels() -> Iterator[Suspect]:
    """Name compiled kernels that are wanted and not in use."""
    found = unwanted()
    if found:
        named = "; ".join(f"{name}: {why}" for name, why in sorted(found.items()))
        yield causes.KERNELS_MISSING, Subject(), f"{kernels_text()} kernels are in use ({named})"


def look_at_replicas(
    peers: Sequence[PeerLink], statuses: Sequence[ReplicaStatus], timeout_s: float
) -> Iterator[Suspect]:
    """Name replicas that nothing is received from, or cannot be followed."""
    # the reference's replicas speak only when something happens
    terse = {one.peer for one in statuses if one.state == "foreign"}
    for peer in peers:
        subject = Subject(peer=peer.endpoint)
        if peer.is_refused:
            yield causes.REPLICA_REFUSED, subject, "it hangs up on our handshake"
        elif not peer.is_connected:
            yield causes.REPLICA_UNREACHABLE, subject, "no connection"
        elif peer.quiet_s > timeout_s and peer.endpoint not in terse:
            yield causes.REPLICA_SILENT, subject, f"connected, and no word for {peer.quiet_s:.0f} s"
    for one in statuses:
        subject = Subject(peer=one.peer)
        if one.state == "behind":
            what = f"{one.missing} statements missing, {one.pulls_failed} fetches failed"
            yield causes.REPLICA_BEHIND, subject, what
        if one.state == "synced" and one.unbooked * 2 > one.claims:
            what = f"{one.unbooked} of its {one.claims} reservations are on workers unknown here"
            yield causes.REPLICA_WORKERS, subject, what


def look_at_sources(sources: Sequence[SourceLink], stale_s: float) -> Iterator[Suspect]:
    """Name sources of discovery that cannot be read, and ids that several pods claim."""
    for source in sources:
        if source.age_s > max(stale_s, 2.0 * source.every_s):
            why = f": {source.trouble}" if source.trouble else ""
            what = f"{source.name} was last read {source.age_s:.0f} s ago{why}"
            yield causes.DISCOVERY_STALE, Subject(source=source.name), what
        for worker_id, (owner, *others) in source.shared.items():
            what = f"{owner} has the id, left out are {', '.join(others[:NAMED_MAX])}"
            if len(others) > NAMED_MAX:
                what += f" and {len(others) - NAMED_MAX} more"
            yield causes.WORKER_ID_SHARED, Subject(source=source.name, worker_id=worker_id), what


class WallClock:
    """Whether our own wall clock goes on as the monotonic one does."""

    def __init__(self) -> None:
        self._ahead: float | None = None  # of the monotonic clock, at the last look
        self._set_by = 0.0
        self._shown_until = 0.0

    def look(self, now: float, ahead: float) -> Iterator[Suspect]:
        """Name that it was set, some while long; `ahead` of the monotonic one it is now."""
        step = 0.0 if self._ahead is None else ahead - self._ahead
        self._ahead = ahead
        if abs(step) >= SET_S:
            self._set_by, self._shown_until = step, now + CLOCK_SET_SHOWN_S
        if now < self._shown_until:
            how = "forward" if self._set_by > 0.0 else "back"
            what = f"our wall clock went {how} by {abs(self._set_by):.0f} s"
            yield causes.CLOCK_SET, Subject(), what


class Habits:
    """How callers and namesakes behave, by counters that only go up."""

    def __init__(
        self, reader: RequestReader, counters: Counters, replicas: ReplicaCounters, now: float
    ) -> None:
        self._reader = reader
        self._counters = counters
        self._replicas = replicas
        self._growth = CounterGrowth(self._counts(), now)

    def _counts(self) -> tuple[int, ...]:
        counters = self._counters
        return (
            self._reader.strayed,
            counters.reservations_expired,
            counters.reservations_freed,
            counters.reservations_expired_early,
            self._replicas.namesakes,
        )

    def look(self, now: float) -> Iterator[Suspect]:
        """Name what has gone on lately."""
        strayed, expired, freed, early, namesakes = self._growth.of(self._counts(), now)
        scope = self._reader.strayed_to
        if strayed >= STRAYED_MIN and scope is not None:
            subject = Subject(model_name=scope.model_name, tenant_id=scope.tenant_id)
            yield causes.UNKNOWN_MODEL, subject, f"{strayed} requests lately, no worker"
        if early >= EARLY_MIN:
            what = f"{early} reservations were spoken of lately that had expired before"
            yield causes.EXPIRED_EARLY, Subject(), what
        elif expired >= EXPIRED_MIN and expired > freed:
            what = f"{expired} reservations expired lately, {freed} were freed"
            yield causes.NEVER_FREED, Subject(), what
        if namesakes:
            yield causes.REPLICA_NAMESAKE, Subject(), f"{namesakes} messages under our router id"
