"""Session affinity: requests of a session follow its last one to the same rank, while that pays.

A session belongs to one partition, so tenants stay separate. It ends after `session_ttl_s` of
silence, or sooner if its own gaps are shorter, or once `sessions_max` others have been active
since; while a request of it runs, or waits for a place, it is not silent. What is known of its gaps
is kept for `session_ttl_s`, so that longer ones are learnt, too. It survives a restart. Replicas
hear of it with its reservations, and where it has none, in messages of their own: once it moves,
and every `RETOLD_SHARE` of `session_ttl_s` while it does not.

A session's rank has a version, which grows each time it is sent to replicas. The larger version
counts, and of two chosen at once the larger rank: all agree in whatever order messages come. No
clock is compared. A replica that starts from an old file or from nothing has small versions: they
move no session back. `routing/filters.py` reads the rank before pricing, and notes the choice.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct

from select_service.core.changes import SESSION
from select_service.core.replication.messages import SessionRank
from select_service.core.replication.publishers import LOOKS_PER_STEP
from select_service.core.tenancy.shares import Shares
from select_service.core.tenancy.tenant_parts import TenantParts
from select_service.errors import NameRefused

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from indexer.types import Scope
    from select_service.core.changes import Changes
    from select_service.core.columns import Rows, Slots
    from select_service.core.partition import Partition
    from select_service.core.tenancy.shares import Party
    from select_service.types import CoreLimits

_FORGOTTEN_AT_ONCE: Final = 2
"""Sessions forgotten at most for each one noted: their number never grows past the maximum, and
shrinks if that was lowered."""

RETOLD_SHARE: Final = 0.25
"""Of `session_ttl_s`: so long replicas are not told again of a session that stays where it is, and
so much sooner they may forget it."""

GAP_TTL_MIN_S: Final = 5.0
"""Silence that every session may have, however short its gaps were."""

_VERSION_MAX: Final = (1 << 32) - 1
"""What a message can state; no session is sent as often."""

_AT_ONCE_S: Final = 1.0
"""Replicas that choose within this time did not know each other's choice."""

_RISE: Final = 0.5
_FALL: Final = 0.0625
"""How far the estimate of a session's gaps follows a longer one, and a shorter one: it stays near
the longest of the usual ones, and one that is out of the ordinary is half forgotten after ten."""


class SessionCounters(Struct):
    """Outcomes of requests with a session; they only grow."""

    begun: int = 0  # the session was unknown
    kept: int = 0
    # its rank's queue exceeded the shortest by more than the whole prompt
    moved_busy: int = 0
    moved_ineligible: int = 0  # its rank may not take the request, or drains
    released: int = 0  # its rank has gone, or has gone and come back
    expired: int = 0
    evicted: int = 0  # to make room for later sessions


class _SessionRank(NamedTuple):
    slot: int
    tenure: int  # of its rank, see `Ledger.previous_ranks`
    active_at: float  # when a request of it came, or ended
    until: float  # if it is not heard of again
    running: int = 0  # live reservations
    is_resting: bool = False  # none is, and one has ended
    gap_s: float = 0.0  # estimate of its long gaps from an end to the next request; 0: none yet
    sent_at: float = -math.inf  # when replicas last heard where it is; not in this life
    version: int = 1
    sent_by: int = 0  # router id of the replica that announced it last; 0: we


_SessionRanks: TypeAlias = "OrderedDict[tuple[Partition, str], _SessionRank]"


class Sessions:
    """The rank of each session. Every method is O(1), plus O(ranks) to compare their queues."""

    def __init__(self, limits: CoreLimits, shares: Shares | None = None) -> None:
        self._limits = limits
        shares = shares or Shares(limits)
        bound = shares.bound("sessions_max", lambda: limits.sessions_max)
        self._rows: TenantParts[_SessionRanks] = TenantParts(
            shares, bound, OrderedDict
        )  # longest silent first
        self.counters = SessionCounters()
        self.changes: Changes | None = None
        """Set where state is kept."""
        self.is_shared = False  # whether there may be replicas
        self._unsent: dict[tuple[Partition, str], bool] = {}
        """Sessions to announce to replicas, and whether a request of it came just now."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_on(self) -> bool:
        """Whether sessions are kept at all."""
        return self._limits.session_ttl_s > 0.0

    def rows(
        self, partition: Partition, session_id: str, rows: Rows, isl_tokens: int, asked_at: float
    ) -> Slots | None:
        """Return the session's rank alone if it should take the request; None: choose freely.

        It should unless it is no candidate, or another candidate could have computed the whole
        prompt by the time the rank gets to it: its queue exceeds that of the least loaded candidate
        by more than the prompt's length.

        Raises:
            NameRefused: the name is too long, or no log could print it.
        """
        most = self._limits.id_length_max
        if len(session_id) > most or not session_id.isprintable():
            raise NameRefused.of("session_id", session_id, most, "id_length_max")
        counters, key = self.counters, (partition, session_id)
        found = self._rows.where(partition.scope.tenant_id)
        holder, ranks = next((one for one in found if key in one[1]), (None, self._rows.common))
        rank = ranks.get(key)
        if rank is None or (rank.until <= asked_at and not rank.running):
            counters.begun += 1
            counters.expired += rank is not None  # `note` puts the new one in its place
            return None
        slot, ledger = rank.slot, partition.ledger
        if not _is_there(partition, rank):
            self._drop(holder, ranks, key)
            counters.released += 1
            return None
        if not (slot < rows.stop if isinstance(rows, slice) else bool((rows == slot).any())):
            counters.moved_ineligible += 1
            return None
        prefill = ledger.loads.prefill
        if prefill[slot] - prefill[rows].min() > isl_tokens:
            counters.moved_busy += 1
            return None
        counters.kept += 1
        return np.array([slot], dtype=np.int64)

    def note(
        self,
        partition: Partition,
        session_id: str,
        slot: int,
        now: float,
        *,
        is_booked: bool,
        asked_at: float | None = None,
    ) -> None:
        """Record that a request of the session went to this slot.

        `is_booked`: replicas hear of it with its reservation. Else they are told of a session that
        has moved, and once in a while of one that has not. `asked_at` None: the request came now.
        """
        if not self.is_on:
            return
        key, before = (partition, session_id), self._take(partition, session_id)
        stays = before is not None and before.slot == slot and _is_there(partition, before)
        sent_at = before.sent_at if before is not None and stays else -math.inf
        is_due = is_booked or now - sent_at >= RETOLD_SHARE * self._limits.session_ttl_s
        version = 0 if before is None else before.version
        if not stays or (is_due and sent_at > -math.inf):
            version = min(version + 1, _VERSION_MAX)
        if is_booked:
            self._unsent.pop(key, None)
        elif is_due and self.is_shared:
            self._unsent[key] = True
        sent_at = now if is_due else sent_at
        rank = self._at(before, partition, slot, version, now, sent_at=sent_at)
        self._asked(key, rank, now, asked_at)

    def apply(
        self,
        partition: Partition,
        session_id: str,
        slot: int,
        now: float,
        *,
        version: int,
        sender: int,
        is_new: bool = True,
    ) -> bool:
        """Record where a replica sent a request of the session, unless a later rank is known.

        `is_new`: that request came just now. `version` 0: the replica knows none; it counts
        as the largest if so, else as the smallest. `sender` is its router id.

        Returns False if a later rank is known.
        """
        if not self.is_on:
            return True
        key, before = (partition, session_id), self.find(partition, session_id)
        known = None if before is None or not _counts(partition, before, now) else before
        if known is not None and is_new:
            if not version:
                version = min(known.version + 1, _VERSION_MAX)
            elif version == known.version and slot != known.slot:
                known = _reasserted(known, now)
        is_later = known is None or (
            _order(partition, slot, version) >= _order(partition, known.slot, known.version)
        )
        if is_later:
            self._unsent.pop(key, None)
            rank = self._at(before, partition, slot, version, now, sent_at=now, sent_by=sender)
        elif is_new and known is not None:
            rank = known._replace(sent_by=0)
        else:
            return False
        if is_new:
            self._take(partition, session_id)
            self._asked(key, rank, now)
        elif known is not None:
            self._set(key, rank)
        else:
            self._take(partition, session_id)
            until = now + self._limits.session_ttl_s
            self._put(partition, session_id, rank._replace(active_at=now, until=until), now)
        return is_later

    def _at(
        self,
        before: _SessionRank | None,
        partition: Partition,
        slot: int,
        version: int,
        now: float,
        *,
        sent_at: float,
        sent_by: int = 0,
    ) -> _SessionRank:
        """Return what is known of a session, at a slot."""
        if before is None:
            before = _SessionRank(slot, 0, now, now + self._limits.session_ttl_s)
        tenure = partition.ledger.previous_ranks[slot]
        rank = before._replace(slot=slot, tenure=tenure, version=version)
        return rank._replace(sent_at=sent_at, sent_by=sent_by)

    def _asked(
        self,
        key: tuple[Partition, str],
        rank: _SessionRank,
        now: float,
        asked_at: float | None = None,
    ) -> None:
        """Put a session that was taken out of its row there again, for a request; learn its gap."""
        gap_s = rank.gap_s
        if rank.is_resting:
            gap = max((now if asked_at is None else asked_at) - rank.active_at, 0.0)
            share = _RISE if gap > gap_s else _FALL
            gap_s = gap if not gap_s else gap_s + share * (gap - gap_s)
        until = now + self._limits.session_ttl_s
        rank = rank._replace(active_at=now, until=until, is_resting=False, gap_s=gap_s)
        self._put(*key, rank, now)

    def queue(self, partition: Partition, session_id: str) -> None:
        """Tell replicas where a session is: one of them knows an earlier rank."""
        self._unsent.setdefault((partition, session_id), False)

    def queue_all(self, alive: Container[int], now: float) -> Iterator[None]:
        """Queue, for a replica that starts, all sessions that no other one of `alive` announces.

        Those are the ones that replicas heard of from us last, or from one that is gone. In steps.
        """
        for ranks in self._rows.rows:
            for number, key in enumerate(list(ranks)):
                rank = ranks.get(key)
                if rank and rank.sent_by not in alive and _counts(key[0], rank, now):
                    self._unsent.setdefault(key, False)
                if number % LOOKS_PER_STEP == 0:
                    yield

    def take_unsent(self, limit: int) -> list[SessionRank]:
        """Take up to `limit` sessions to announce to replicas."""
        ranks: list[SessionRank] = []
        while self._unsent and len(ranks) < limit:
            key = partition, session_id = next(iter(self._unsent))
            is_new = self._unsent.pop(key)
            rank = self.present(partition, session_id)
            if rank is not None:
                worker, dp_rank = partition.fleet_slots.rank_at(rank.slot)
                named = *partition.scope, session_id, worker.worker_id, dp_rank
                ranks.append(SessionRank(*named, rank.version, is_new))
        return ranks

    def run(self, partition: Partition, session_id: str) -> int:
        """Record that a request of the session has a reservation, whose end will be told.

        Returns the version of the session's rank; 0: it is unknown.
        """
        key, version = (partition, session_id), 0
        for _, ranks in self._rows.where(partition.scope.tenant_id):
            if (rank := ranks.get(key)) is not None:
                ranks[key] = rank._replace(running=rank.running + 1, is_resting=False)
                version = rank.version
        return version

    def rest(self, partition: Partition, session_id: str, now: float) -> None:
        """Record that a request of the session has ended; after the last one a gap begins.

        Its silence may last `session_gap_factor` times as long as its own gaps do, from
        `GAP_TTL_MIN_S` to `session_ttl_s`.
        """
        rank = self._take(partition, session_id) if self.is_on else None
        if rank is None:
            return
        running = max(0, rank.running - 1)  # not counted are those of an earlier life
        silence_s = self._limits.session_ttl_s if running else self._silence_s(rank.gap_s)
        rank = rank._replace(
            active_at=now, until=now + silence_s, running=running, is_resting=not running
        )
        self._put(partition, session_id, rank, now)

    def _silence_s(self, gap_s: float) -> float:
        """Return how long a session with such gaps may be silent."""
        limits = self._limits
        if not gap_s or not limits.session_gap_factor:
            return limits.session_ttl_s
        return min(limits.session_ttl_s, max(GAP_TTL_MIN_S, limits.session_gap_factor * gap_s))

    def _take(self, partition: Partition, session_id: str) -> _SessionRank | None:
        """Take a session out of its row; None: it is unknown."""
        key, found = (partition, session_id), None
        for holder, ranks in self._rows.where(partition.scope.tenant_id):
            rank = ranks.pop(key, None)
            if rank is not None:
                self._rows.left(holder)
                found = rank
        return found

    def _put(self, partition: Partition, session_id: str, rank: _SessionRank, now: float) -> None:
        """Put a session last in its row, and forget others that are due."""
        key = partition, session_id
        holder, ranks = self._rows.place(partition.scope.tenant_id)
        ranks[key] = rank
        self._rows.took(holder)
        self._mark(key)
        for _ in range(_FORGOTTEN_AT_ONCE):
            if not self._forget_expired(holder, ranks, now) and not self._make_room(holder, now):
                break

    def _drop(self, holder: Party, ranks: _SessionRanks, key: tuple[Partition, str]) -> None:
        del ranks[key]
        self._unsent.pop(key, None)
        self._rows.left(holder)
        self._mark(key)

    def _mark(self, key: tuple[Partition, str]) -> None:
        if self.changes is not None:
            self.changes.mark(SESSION, _name_of(key[0].scope, key[1]))

    def find(self, partition: Partition, session_id: str) -> _SessionRank | None:
        """Return what is known of a session."""
        rows = self._rows.where(partition.scope.tenant_id)
        return next(filter(None, (ranks.get((partition, session_id)) for _, ranks in rows)), None)

    def present(self, partition: Partition, session_id: str) -> _SessionRank | None:
        """Return what is known of a session whose rank is there."""
        rank = self.find(partition, session_id)
        return None if rank is None or not _is_there(partition, rank) else rank

    def restore(
        self,
        partition: Partition,
        session_id: str,
        slot: int,
        now: float,
        *,
        gap_s: float,
        version: int,
    ) -> bool:
        """Remember a session of an earlier life, with a time to live as after its last request.

        Returns whether no later rank is known.
        """
        is_new = self.find(partition, session_id) is None
        if not self.is_on or not self.apply(
            partition, session_id, slot, now, version=version, sender=0, is_new=False
        ):
            return False
        rank = self.find(partition, session_id)
        if rank is not None:
            gap_s = rank.gap_s or gap_s
            until = now + self._silence_s(gap_s) if is_new else rank.until
            rank = rank._replace(gap_s=gap_s, until=until, sent_at=-math.inf)
            self._set((partition, session_id), rank)
        return True

    def _set(self, key: tuple[Partition, str], rank: _SessionRank) -> None:
        """Change what is known of a session, without a sign of life."""
        for _, ranks in self._rows.where(key[0].scope.tenant_id):
            if key in ranks:
                ranks[key] = rank
        self._mark(key)

    def _forget_expired(self, holder: Party, ranks: _SessionRanks, now: float) -> bool:
        """Forget the oldest session of a row if it was silent for too long; whether it was."""
        key = self._due(ranks, now)
        if key is None or ranks[key].running:
            return False
        self._drop(holder, ranks, key)
        self.counters.expired += 1
        return True

    def _keep_running(self, ranks: _SessionRanks, now: float) -> bool:
        """Make the oldest session the latest if its request runs for long; whether it does."""
        key = self._due(ranks, now)
        if key is None or not ranks[key].running:
            return False
        ranks[key] = ranks[key]._replace(active_at=now)
        ranks.move_to_end(key)
        return True

    def _due(self, ranks: _SessionRanks, now: float) -> tuple[Partition, str] | None:
        """Return the oldest session of a row if nothing came of it for too long."""
        key = next(iter(ranks), None)
        if key is None or ranks[key].active_at + self._limits.session_ttl_s > now:
            return None
        return key

    def _make_room(self, holder: Party, now: float) -> bool:
        """Forget the oldest session of the row that has to make room; False if none has to."""
        crowded = self._rows.crowded(holder)
        if crowded is None:
            return False
        whose, ranks = crowded
        if not self._forget_expired(whose, ranks, now):
            self._drop(whose, ranks, next(iter(ranks)))
            self.counters.evicted += 1
        return True

    def forget(self, now: float, limit: int) -> bool:
        """Forget sessions that are expired or too many; True if more should go.

        At most `limit` go in this turn.
        """
        left = limit
        for holder, ranks in self._rows.turns(limit):
            while left and (
                self._forget_expired(holder, ranks, now) or self._keep_running(ranks, now)
            ):
                left -= 1
        while left and self._make_room(None, now):
            left -= 1
        return not left

    def check(self) -> None:
        """Assert all invariants."""
        self._rows.check()
        assert len(self._unsent) <= len(self._rows)
        for ranks in self._rows.rows:
            assert all(rank.gap_s >= 0.0 and rank.running >= 0 for rank in ranks.values())


def _is_there(partition: Partition, rank: _SessionRank) -> bool:
    """Whether a session's rank has not left, nor left and come back."""
    ranks = partition.ledger.previous_ranks
    return rank.slot < len(ranks) and ranks[rank.slot] == rank.tenure


def _order(partition: Partition, slot: int, version: int) -> tuple[int, int, int]:
    """Return what the ranks of a session are compared by; the largest counts."""
    worker, dp_rank = partition.fleet_slots.rank_at(slot)
    return version, worker.worker_id, dp_rank


def _counts(partition: Partition, rank: _SessionRank, now: float) -> bool:
    """Whether a session's rank is there and the session not over."""
    return _is_there(partition, rank) and (rank.running > 0 or rank.until > now)


def _reasserted(rank: _SessionRank, now: float) -> _SessionRank:
    """Return a session's rank with a larger version than that of a replica that never heard of it.

    A replica that moved the session at once with us had no chance to.
    """
    is_long_known = _AT_ONCE_S < now - rank.sent_at < math.inf
    return rank._replace(version=min(rank.version + is_long_known, _VERSION_MAX))


def _name_of(scope: Scope, session_id: str) -> str:
    """Return the name of a session's row."""
    return msgspec.json.encode((*scope, session_id)).decode()
