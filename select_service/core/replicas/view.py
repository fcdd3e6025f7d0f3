"""One publisher as we see it: how far we have heard it, and what is missing.

Numbers only. Statements apply in any order, so what comes out of order is taken as it comes; this
room knows which numbers have not been heard, when that is a reason to fetch the publisher's
snapshot, and what a snapshot settles. `publishers.py` keeps them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from select_service.core.replicas.claims import SEQ_BITS

if TYPE_CHECKING:
    from select_service.core.replicas.claim import ClaimSet
    from select_service.core.replicas.messages import Heartbeat
    from select_service.types import CoreLimits


class Incoming:
    """A snapshot on its way in."""

    __slots__ = ("promised", "seen", "seq")

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.seen: dict[int, str] = {}  # numbers of the claims it holds, with their ids
        self.promised: int | None = None  # how many there are, by its last part


class View:
    """How far one publisher has been heard."""

    def __init__(self, router_id: int, epoch: int, claims: ClaimSet, now: float) -> None:
        self.router_id = router_id
        self.claims = claims
        self.epoch = epoch
        self.high = (epoch - 1) << SEQ_BITS  # the newest number we know of
        self.missing: dict[int, float] = {}  # numbers below it not heard; since when
        self.hole: int | None = None  # only a snapshot from here on makes the picture whole
        self.peer = ""
        self.http_port = 0
        self.url: str | None = None
        self.heard_at = now
        self.gone = False
        self.checked = False  # its last message had a checksum, which was right
        self.leaving = False  # it has said that it will go
        self.beaten = (0, 0)  # statement and number of the newest heartbeat
        self.buried = False  # being forgotten
        self.bury_at = 0.0  # not before
        self.greeted = False
        self.ask_again_at: float | None = None
        self.pulls = self.pulls_failed = 0
        self.pulling_since: float | None = None
        self.next_pull_at = 0.0
        self.asked_high: int | None = None  # the newest number we knew of when we asked for it
        self.incoming: Incoming | None = None
        self.gaps = 0

    @property
    def whole(self) -> bool:
        """Whether everything it has said up to `high` is known."""
        return not self.missing and self.hole is None

    def hear(self, seq: int, now: float, limits: CoreLimits) -> bool:
        """A statement has arrived; False when it was heard before."""
        if seq <= self.high:
            return self.missing.pop(seq, None) is not None
        self._skip_to(seq - 1, now, limits)
        self.high = seq
        return True

    def is_old(self, beat: Heartbeat) -> bool:
        """Tell whether a heartbeat was heard before, or a later one was; also of one that is gone.

        Of another life statements are numbered higher, and so are its heartbeats.
        """
        return bool(beat.number) and (beat.seq, beat.number) <= self.beaten

    def follow(self, beat: Heartbeat) -> None:
        """Believe what it says of itself, unless it has said more since."""
        if beat.seq >= self.high or not any(self.beaten):  # the first, or no late one
            self.http_port, self.url = beat.http_port, beat.url
            self.leaving = beat.leaving
        self.beaten = beat.seq, beat.number

    def announced(self, beat: Heartbeat, now: float, limits: CoreLimits) -> bool:
        """It says how much it has said; False when it must have said something else than we know.

        Only comparable when nothing is missing.
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
        """All numbers up to this one exist; those that are new have not been heard."""
        if seq >> SEQ_BITS != self.high >> SEQ_BITS:  # a new life: of the old one nothing counts
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
        """Tell whether what it said under this number is certainly known, or over by now."""
        heard = seq <= self.high and seq not in self.missing
        return heard and (self.hole is None or seq > self.hole)

    def mentioned(self, seq: int, now: float, limits: CoreLimits) -> None:
        """Somebody else has heard it say something under this number, in this life."""
        if seq > self.high and seq >> SEQ_BITS == self.high >> SEQ_BITS:
            self._skip_to(seq, now, limits)
            self.high = seq

    def doubt(self) -> None:
        """Something was certainly missed: nothing short of a new snapshot will do."""
        self.hole = self.high

    def greet(self, beat: Heartbeat, now: float, limits: CoreLimits) -> None:
        """At first sight fetch what it knows, and once more when it must have noticed who is gone.

        What it has never stated itself (of replicas that died before we came) is heard no other
        way.
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
        """Its snapshot is being fetched from now on."""
        self.pulling_since = now
        self.pulls += 1
        if self.asked_high is None:  # an earlier answer may be on its way yet
            self.asked_high = self.high

    def comes_in(self, seq: int, now: float) -> bool:
        """Its snapshot begins; False when it has said less, by that, than we took it for.

        What we knew of when we asked it had said by then, unless that was garbled, or it has lost
        what it knew. All above is heard anew, and what was missed meanwhile the next heartbeat
        tells.
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
        """The picture is whole up to this number; None: the pull has failed."""
        self.pulling_since = None
        self.incoming = None
        self.next_pull_at = now + limits.replica_pull_retry_s
        if seq is None:
            self.pulls_failed += 1
            return
        if self.hole is not None and seq >= self.hole:
            self.hole = None
        for number in [one for one in self.missing if one <= seq]:
            del self.missing[number]
        self.high = max(self.high, seq)

    @property
    def state(self) -> Literal["synced", "behind", "leaving", "gone"]:
        """In one word."""
        if self.gone:
            return "gone"
        if not self.whole:
            return "behind"
        return "leaving" if self.leaving else "synced"
