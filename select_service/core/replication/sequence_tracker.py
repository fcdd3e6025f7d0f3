"""How far one publisher has been heard, and what is missing.

Numbers only. Statements apply in any order, so those out of order are applied as they come; this
module tracks which numbers were missed, when that is a reason to fetch the publisher's snapshot,
and what a snapshot settles. `publishers.py` keeps the views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from select_service.core.replication.statement_outbox import SEQ_BITS

if TYPE_CHECKING:
    from select_service.core.replication.claim import ClaimSet
    from select_service.core.replication.messages import Heartbeat
    from select_service.types import CoreLimits


class Incoming:
    """A snapshot being received."""

    __slots__ = ("promised", "seen", "seq")

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.seen: dict[int, str] = {}  # born numbers of its claims, with their ids
        self.promised: int | None = None  # the number of claims, from its last part


class SequenceTracker:
    """How far one publisher has been heard."""

    def __init__(self, router_id: int, epoch: int, claims: ClaimSet, now: float) -> None:
        self.router_id = router_id
        self.claims = claims
        self.epoch = epoch
        self.high = (epoch - 1) << SEQ_BITS  # the highest number we know of
        self.before_listening = self.high  # stated before; unknown until its first snapshot
        self.missing: dict[int, float] = {}  # lower numbers not heard → since when
        self.hole: int | None = None  # only a snapshot from this number on completes the view
        self.peer = ""
        self.http_port = 0
        self.url: str | None = None
        self.heard_at = now
        self.gone = False
        self.checked = False  # its last message had a correct checksum
        self.leaving = False  # it announced that it will go
        self.beaten = (0, 0)  # statement and number of the latest heartbeat
        self.reports_applied = (0, 0)  # life and number of its latest message of reports
        self.buried = False  # it is being forgotten
        self.bury_at = 0.0  # not before
        self.greeted = False
        self.ask_again_at: float | None = None
        self.pulls = self.pulls_failed = 0
        self.pulling_since: float | None = None
        self.next_pull_at = 0.0
        self.asked_high: int | None = None  # `high` at the time of the request
        self.incoming: Incoming | None = None
        self.gaps = 0

    @property
    def whole(self) -> bool:
        """Whether all its statements up to `high` are known."""
        return not self.missing and self.hole is None

    def receive(self, seq: int, now: float, limits: CoreLimits) -> bool:
        """Register a statement; False if it was heard before."""
        if seq <= self.high:
            return self.missing.pop(seq, None) is not None
        self._skip_to(seq - 1, now, limits)
        self.high = seq
        return True

    def is_old(self, beat: Heartbeat) -> bool:
        """Tell whether this or a later heartbeat was heard before, also for a lost publisher.

        Another life numbers statements higher, and so its heartbeats compare higher, too.
        """
        return bool(beat.number) and (beat.seq, beat.number) <= self.beaten

    def follow(self, beat: Heartbeat) -> None:
        """Take over what a heartbeat says of its sender, unless there is later news."""
        if beat.seq >= self.high or not any(self.beaten):  # the first, or not a late one
            self.http_port, self.url = beat.http_port, beat.url
            self.leaving = beat.leaving
        self.beaten = beat.seq, beat.number

    def announced(self, beat: Heartbeat, now: float, limits: CoreLimits) -> bool:
        """Compare a heartbeat with what is known; False: something differs from what it stated.

        The two are comparable only if nothing is missing.
        """
        if beat.seq > self.high:
            self._skip_to(beat.seq, now, limits)
            self.high = beat.seq
        if beat.seq < self.high or not self.whole:
            return True
        if (beat.live, beat.digest) == (len(self.claims), self.claims.digest):
            return True
        self.doubt()
        return False

    def _skip_to(self, seq: int, now: float, limits: CoreLimits) -> None:
        """Mark all new numbers up to this one as existing, but not heard."""
        if seq >> SEQ_BITS != self.high >> SEQ_BITS:  # a new life: nothing of the old one counts
            self.missing.clear()
            self.hole = (seq >> SEQ_BITS) << SEQ_BITS
            self.epoch = (seq >> SEQ_BITS) + 1
            self.high = self.hole
        count = seq - self.high
        if count <= 0:
            return
        self.gaps += 1
        if len(self.missing) + count > limits.replica_missing_max:
            self.missing.clear()
            self.hole = seq
            return
        for number in range(self.high + 1, seq + 1):
            self.missing[number] = now

    def has_heard(self, seq: int) -> bool:
        """Tell whether the statement with this number is certainly known, or over by now."""
        received = seq <= self.high and seq not in self.missing
        return received and seq > max(self.before_listening, self.hole or 0)

    def mentioned(self, seq: int, now: float, limits: CoreLimits) -> None:
        """Register that others have heard a statement with this number, in the current life."""
        if seq > self.high and seq >> SEQ_BITS == self.high >> SEQ_BITS:
            self._skip_to(seq, now, limits)
            self.high = seq

    def doubt(self) -> None:
        """Note that something was certainly missed: only a new snapshot can repair that."""
        self.hole = self.high

    def greet(self, beat: Heartbeat, now: float, limits: CoreLimits) -> None:
        """Request a snapshot at first sight, and again once it must have noticed lost publishers.

        Claims it never stated itself (of replicas that died before we came) reach us no other way.
        """
        if not self.greeted and (beat.http_port or beat.url):
            self.greeted = True
            self.ask_again_at = now + limits.replica_timeout_s + 2 * limits.replica_heartbeat_s
            self.doubt()
        elif self.ask_again_at is not None and now >= self.ask_again_at:
            self.ask_again_at = None
            self.doubt()

    def wants_pull(self, now: float, limits: CoreLimits) -> bool:
        """Whether its snapshot should be fetched now."""
        if self.whole or self.gone or not (self.http_port or self.url):
            return False
        if self.pulling_since is not None:
            if now - self.pulling_since < limits.replica_pull_timeout_s:
                return False
            self.pulled(None, now, limits)
        if now < self.next_pull_at:
            return False
        oldest = next(iter(self.missing.values()), now)
        return self.hole is not None or now - oldest >= limits.replica_gap_grace_s

    def asks(self, now: float) -> None:
        """Note that its snapshot is being fetched."""
        self.pulling_since = now
        self.pulls += 1
        if self.asked_high is None:  # an earlier response may still be on its way
            self.asked_high = self.high

    def comes_in(self, seq: int, now: float) -> bool:
        """Begin a snapshot; False if it ends below the number we knew of when we requested it.

        The publisher had stated that number by then, unless the message was garbled, or it lost its
        state. Higher numbers will be heard anew, and the next heartbeat tells of any missed
        meanwhile.
        """
        self.pulling_since = now
        self.incoming = Incoming(seq)
        if self.asked_high is None or seq >= self.asked_high:
            return True
        self.high = seq
        self.epoch = (seq >> SEQ_BITS) + 1
        self.hole = None if self.hole is None else min(self.hole, seq)
        for number in [one for one in self.missing if one > seq]:
            del self.missing[number]
        self.beaten = min(self.beaten, (seq, 0))
        return False

    def pulled(self, seq: int | None, now: float, limits: CoreLimits) -> None:
        """Complete the view up to this number; None: the pull failed."""
        self.pulling_since = None
        self.incoming = None
        self.next_pull_at = now + limits.replica_pull_retry_s
        if seq is None:
            self.pulls_failed += 1
            return
        if self.hole is not None and seq >= self.hole:
            self.hole = None
        if seq >= self.before_listening:
            self.before_listening = 0
        for number in [one for one in self.missing if one <= seq]:
            del self.missing[number]
        self.high = max(self.high, seq)

    @property
    def state(self) -> Literal["synced", "behind", "leaving", "gone"]:
        """The state of the view in one word."""
        if self.gone:
            return "gone"
        if not self.whole:
            return "behind"
        return "leaving" if self.leaving else "synced"
