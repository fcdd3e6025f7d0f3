"""Sequence numbers of one stream: initial, contiguous, gap, stale, restarted.

Numbers alone cannot distinguish an engine that repeats itself from one that restarted, so the
cursor keeps digests of the batches it applied and compares. `stream` asks it before every batch,
and decides itself what to do about a gap or a restart.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import Final

from msgspec import Struct

from indexer.core.cache_groups import GroupRule

REMEMBERED: Final = 1024
"""Digests kept behind the last batch (at most 16 KiB); replay and live traffic overlap by less."""

UNCONFIRMED_MAX: Final = 200_000
"""Of these, those that only replays have brought, and of which live copies may still come: as many
as a socket holds of them. A publisher that says nothing while its replays go on is not followed
without end: 8 bytes a batch would be gigabytes in a day."""


class SequenceVerdict(Enum):
    """What a sequence number means for the batch that carries it."""

    CONTIGUOUS = "contiguous"  # the next one, or the very first
    GAP = "gap"  # batches before it are missing
    STALE = "stale"  # already applied
    CONFLICT = "conflict"  # another batch than the one that was applied under this number
    RESTARTED = "restarted"  # the engine restarted its numbering: everything known about it is void


class Cursor:
    """Position in a stream; `last` is the sequence of the newest applied batch, initially None."""

    __slots__ = ("_digests", "_zero", "heard", "last")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next batch is expected to be number 0."""
        self.last: int | None = None
        self._digests = array("Q")  # of the batches up to `last`; 0 for those that were given up
        self._zero: int | None = None  # digest of batch 0, never trimmed
        self.heard: int | None = None  # newest that came live; later ones only replays have brought

    @property
    def expected(self) -> int:
        """Sequence of the next batch."""
        return 0 if self.last is None else self.last + 1

    @property
    def is_live(self) -> bool:
        """Whether the last batch came live, not out of a replay."""
        return self.last is not None and self.last == self.heard

    def judge(self, seq: int, digest: int) -> SequenceVerdict:
        """Classify a live batch. O(1).

        A publisher's live sequence numbers only increase. A lower one with the same digest is a
        copy. With another digest number 0 comes from an engine that restarted; any other one may,
        or a wrong replay or a stray message is to blame: `stream` weighs that.
        """
        expected = self.expected
        if seq == expected:
            return SequenceVerdict.CONTIGUOUS
        if seq > expected:
            return SequenceVerdict.GAP
        if self.digest_of(seq) == digest:
            return SequenceVerdict.STALE
        return SequenceVerdict.RESTARTED if seq == 0 < expected - 1 else SequenceVerdict.CONFLICT

    def digest_of(self, seq: int) -> int | None:
        """Digest of an applied batch, None if it is no longer known."""
        if seq == 0:
            return self._zero
        at = len(self._digests) - self.expected + seq
        return (self._digests[at] or None) if 0 <= at < len(self._digests) else None

    @property
    def last_digest(self) -> int | None:
        """Digest of the last batch; None: there is none, or it was given up."""
        return None if self.last is None else self.digest_of(self.last)

    def advance(self, seq: int, digest: int, *, live: bool) -> None:
        """Record that batch `seq`, the expected one, has been applied."""
        assert seq == self.expected
        self.last = seq
        self._digests.append(digest)
        if seq == 0:
            self._zero = digest
        if live:
            self.heard = seq
        if len(self._digests) > 2 * REMEMBERED:
            self._trim()

    def went_on(self, seq: int) -> None:
        """Record that live batches up to `seq` were applied and their digests noted, in order."""
        self.last = self.heard = seq
        if len(self._digests) > 2 * REMEMBERED:
            self._trim()

    def saw_live(self, seq: int) -> None:
        """Record that a live batch was a copy of a replayed one, which confirms all up to it."""
        self.heard = seq if self.heard is None else max(seq, self.heard)

    def rewind(self, seq: int) -> None:
        """Take back what only replays have brought, from `seq` on, which becomes the expected."""
        assert self.heard is not None
        assert self.heard < seq < self.expected
        del self._digests[max(len(self._digests) - (self.expected - seq), 0) :]
        self.last = seq - 1

    def skip_to(self, seq: int) -> None:
        """Give up on every batch before `seq`, which becomes the expected one."""
        assert seq >= self.expected
        missing = seq - self.expected
        if missing:
            known = self._digests if missing <= REMEMBERED else array("Q")
            self._digests = known + array("Q", bytes(8 * missing if known else 0))
            self.last = seq - 1

    def recent(self, count: int) -> tuple[list[int], int | None]:
        """Digests of up to the last `count` batches, newest last, and the digest of batch 0."""
        return [*self._digests[-count:]], self._zero

    def recall(self, last: int, digests: list[int], zero: int | None) -> None:
        """Restore the position of another cursor."""
        self.reset()
        self.last, self._zero = last, zero
        self.heard = last
        self._digests = array("Q", digests[-(last + 1) :])

    def check(self) -> None:
        """Assert the invariants of the digests."""
        assert self.last is None or self.last >= 0
        assert len(self._digests) <= self.expected

    def _trim(self) -> None:
        # Replayed batches beyond the newest live one must stay comparable. Otherwise a lying replay
        # endpoint could make every live copy look stale for ever.
        unconfirmed = 0 if self.heard is None else self.expected - self.heard
        keep = max(REMEMBERED, min(unconfirmed, UNCONFIRMED_MAX))
        if len(self._digests) >= keep + REMEMBERED:  # not with every batch: it is a copy
            self._digests = self._digests[-keep:]


# What a stream must remember to continue in another process where it stopped in this one. A plain
# value written beside the blocks of its rank; `repair` decides what it takes to trust it again.


class StreamMemory(Struct, frozen=True, array_like=True):
    """The position of one stream between two batches."""

    last: int  # sequence of the last batch that the blocks contain
    digests: list[int]  # of the batches up to it, newest last, never empty
    zero: int | None  # digest of batch 0
    lost_batches: int
    names: list[int]  # ranks the engine has reported for itself
    groups: dict[int, bool]  # cache groups: whether their blocks count
    last_batch_ts: float | None
    unknown_batches: int = 0  # of the lost ones; missing in what earlier versions wrote
    limiting: dict[int, GroupRule] = {}  # of the other groups: what a match needs of them
    are_of_one_model: bool = False  # whether one batch told of both
