"""The fleet of a partition and the state of its event streams, as records of decisions need them.

A changed worker costs a rebuild of its own part, plus one pass over existing tuples, which the next
selection pays for, however many ranks there are. Where many workers change without selections, each
change pays for an earlier one. `decision_log.py` owns the snapshots.
"""

from __future__ import annotations

from array import array
from itertools import chain
from math import inf, nan
from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.types import WorkerRank
from select_service.core.decisions.record import (
    ESTIMATED,
    REPLAYING,
    STREAM_STATES,
    Absent,
    RankState,
    RankStates,
)
from select_service.core.fleet.roles import role_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from indexer.core.stream import EventStream
    from indexer.types import Scope
    from select_service.core.columns import Rows
    from select_service.core.fleet.catalog import Catalog, Worker
    from select_service.core.fleet.slots import FleetSlots
    from select_service.core.ledger.cache_estimate import CacheEstimate
    from select_service.core.ledger.rank_speeds import RankSpeeds

STREAMS_S: Final = 0.25
"""Maximum age of the noted stream states: reading a thousand takes 0.2 ms."""

NOTED_MAX: Final = 16
"""Changed workers left to the next selection, including the one that is changing now. 7 µs each,
six times that if none was read for a while."""

_NEW_RANK_BYTES: Final = 240
_RANK_BYTES: Final = 112  # of a rank in a fleet, including what is derived on demand
_SNAPSHOT_BYTES: Final = 512
_LOOK_BYTES: Final = 192
_SILENT: Final = STREAM_STATES.index("silent")
_CURRENT: Final = STREAM_STATES.index("current")
_UNCERTAIN: Final = STREAM_STATES.index("uncertain")


class _Part(NamedTuple):
    """One worker: attached, or absent."""

    rank_states: tuple[RankState, ...]
    streams: tuple[EventStream | None, ...]
    absent: tuple[Absent, ...]


class FleetSnapshot:
    """What a record needs to know of a partition that rarely changes.

    Attributes:
        until: what was noted is valid until then.
        everyone: the rows of all candidates at that time.
        latest: the fleet; by rank, stream states, wall times and speeds.
        size: its new bytes: the first record that has them is charged with them.
    """

    def __init__(
        self,
        scope: Scope,
        fleet_slots: FleetSlots,
        block_size: int,
        catalog: Catalog,
        stream_of: Callable[[WorkerRank], EventStream | None],
        estimate: CacheEstimate,
        *,
        speeds: RankSpeeds,
    ) -> None:
        self._speeds = speeds
        self._estimate = estimate
        self._scope, self._fleet_slots, self._block_size = scope, fleet_slots, block_size
        self._catalog = catalog
        self._stream_of = stream_of
        self._parts: dict[int, _Part] = {}
        self._open: tuple[EventStream | None, ...] = ()  # by rank
        self._fresh = 0  # ranks and absent ranks no record was charged with yet
        here = [worker.worker_id for worker in catalog if worker.scope == scope]
        self._noted = dict.fromkeys([*here, *fleet_slots.workers])  # the latest last
        self.latest = RankStates(scope, block_size, (), ()), b"", b"", b""
        self.everyone: Rows = fleet_slots.everyone
        self.size = 0
        self.until = -inf

    def note(self, worker_id: int) -> None:
        """Note that a worker changed, came or left; it is read when a record needs it, or later."""
        noted = self._noted
        noted.pop(worker_id, None)  # it may be in the middle of changing: read it last
        noted[worker_id] = None
        self.until = -inf
        if len(noted) > NOTED_MAX:
            self._look_at(next(iter(noted)))

    def look(self, now: float) -> None:
        """Rebuild the fleet if it changed, and read the stream states."""
        self.size = _LOOK_BYTES
        fleet_slots = self._attached_now() if self._noted else self.latest[0]
        streams = self._open
        states = bytes([0 if one is None else _state_of(one) for one in streams])
        if self._estimate.in_force:
            states = self._with_estimates(fleet_slots, states)
        stamps = [
            nan if one is None or (stamp := one.last_batch_ts) is None else stamp for one in streams
        ]
        speeds = b""
        if self._speeds.by_slot:
            row = self._speeds.row
            rows = [row(rank.slot) for rank in fleet_slots.rank_states]
            speeds = array("d", chain.from_iterable(rows)).tobytes()
        self.latest = fleet_slots, states, array("d", stamps).tobytes(), speeds
        self.everyone = self._fleet_slots.everyone
        self.size += 9 * len(states) + len(speeds)
        self.until = now + STREAMS_S

    def _with_estimates(self, fleet_slots: RankStates, states: bytes) -> bytes:
        is_in_force = self._estimate.is_in_force
        marked = [
            state + ESTIMATED if is_in_force(rank.slot) else state
            for rank, state in zip(fleet_slots.rank_states, states, strict=True)
        ]
        return bytes(marked)

    def _attached_now(self) -> RankStates:
        for worker_id in list(self._noted):
            self._look_at(worker_id)
        known, fresh, self._fresh = self._parts, self._fresh, 0
        ordered = [known[worker_id] for worker_id in sorted(known)]
        rank_states = tuple(chain.from_iterable([part.rank_states for part in ordered]))
        absent = tuple(chain.from_iterable([part.absent for part in ordered]))
        self._open = tuple(chain.from_iterable([part.streams for part in ordered]))
        places = len(rank_states) + len(absent)
        self.size += _SNAPSHOT_BYTES + _NEW_RANK_BYTES * fresh + _RANK_BYTES * places
        return RankStates(self._scope, self._block_size, rank_states, absent)

    def _look_at(self, worker_id: int) -> None:
        del self._noted[worker_id]
        part = self._part(worker_id)
        if part is None:
            self._parts.pop(worker_id, None)
        else:
            self._parts[worker_id] = part
            self._fresh += len(part.rank_states) + len(part.absent)

    def _part(self, worker_id: int) -> _Part | None:
        worker = self._fleet_slots.workers.get(worker_id)
        if worker is not None:
            return self._attached(worker)
        absent = self._catalog.find(worker_id)
        if absent is None or absent.scope != self._scope:
            return None
        fixed = absent.spec.endpoint, absent.lifecycle == "draining"
        return _Part((), (), tuple([Absent(worker_id, rank, *fixed) for rank in absent.ranks]))

    def _attached(self, worker: Worker) -> _Part:
        worker_id = worker.worker_id
        fixed = worker.spec.endpoint, worker.taints, role_of(worker)
        return _Part(
            tuple(
                [RankState(slot, worker_id, rank, *fixed) for rank, slot in worker.slots.items()]
            ),
            tuple([self._stream_of(WorkerRank(worker_id, rank)) for rank in worker.slots]),
            (),
        )


def _state_of(stream: EventStream) -> int:
    if stream.request is not None:  # only while it replays
        return REPLAYING
    if stream.kv_state == "uncertain":
        return _UNCERTAIN
    return _SILENT if stream.last_event_at is None else _CURRENT
