"""Sequence numbers of one stream: initial, contiguous, gap, stale, restarted.

Numbers alone cannot tell an engine that repeats itself from one that began anew, so the cursor
remembers digests of what it applied and compares. It decides nothing else: what a gap or a restart
costs is up to `stream`, which asks here before every batch.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import Final

REMEMBERED: Final = 1024
"""Digests kept behind the last batch (16 KiB at most): replay and live traffic overlap by less."""

UNCONFIRMED_MAX: Final = 200_000
"""Of these, those that only replays have brought, and of which live copies may still come: as many
as a socket holds of them. A publisher that says nothing while its replays go on is not followed
without end: 8 bytes a batch would be gigabytes in a day."""


class Verdict(Enum):
    """What a sequence number means for the batch that carries it."""

    CONTIGUOUS = "contiguous"  # the next one, or the very first
    GAP = "gap"  # batches before it are missing
    STALE = "stale"  # applied already
    RESTARTED = "restarted"  # the engine counts anew: what was known of it is void


class Cursor:
    """Position in a stream; `last` is the sequence of the newest batch applied, None at first."""

    __slots__ = ("_digests", "_floor", "_zero", "last")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next batch is expected to be number 0."""
        self.last: int | None = None
        self._digests = array("Q")  # of the batches up to `last`, without a hole
        self._zero: int | None = None  # digest of batch 0, remembered for ever
        self._floor: int | None = None  # newest batch seen live; above it only replays have been

    @property
    def expected(self) -> int:
        """Sequence of the next batch."""
        return 0 if self.last is None else self.last + 1

    @property
    def is_live(self) -> bool:
        """Whether the last batch came live, not out of a replay."""
        return self.last is not None and self.last == self._floor

    def judge(self, seq: int, digest: int) -> Verdict:
        """Say what a live batch is. O(1).

        A publisher's live batches only ever grow, so a lower one is either a copy of what a
        replay brought (same digest) or comes from an engine that has restarted.
        """
        expected = self.expected
        if seq == expected:
            return Verdict.CONTIGUOUS
        if seq > expected:
            return Verdict.GAP
        return Verdict.STALE if self.digest_of(seq) == digest else Verdict.RESTARTED

    def digest_of(self, seq: int) -> int | None:
        """Digest of an applied batch, None if it is not remembered."""
        if seq == 0:
            return self._zero
        at = len(self._digests) - self.expected + seq
        return self._digests[at] if 0 <= at < len(self._digests) else None

    def advance(self, seq: int, digest: int, *, live: bool) -> None:
        """Batch `seq` has been applied; it is the expected one."""
        assert seq == self.expected
        self.last = seq
        self._digests.append(digest)
        if seq == 0:
            self._zero = digest
        if live:
            self._floor = seq
        if len(self._digests) > 2 * REMEMBERED:
            self._trim()

    def went_on(self, seq: int) -> None:
        """Live batches up to `seq` have been applied and their digests noted, one after another."""
        self.last = self._floor = seq
        if len(self._digests) > 2 * REMEMBERED:
            self._trim()

    def saw_live(self, seq: int) -> None:
        """A live batch turned out to be a copy: everything up to it is confirmed."""
        self._floor = seq

    def skip_to(self, seq: int) -> None:
        """Give up on every batch before `seq`, which becomes the expected one."""
        assert seq >= self.expected
        if seq != self.expected:
            self.last = seq - 1
            self._digests = array("Q")

    def recent(self, count: int) -> tuple[list[int], int | None]:
        """Digests of up to `count` last batches, the newest last, and that of batch 0."""
        return [*self._digests[-count:]], self._zero

    def recall(self, last: int, digests: list[int], zero: int | None) -> None:
        """Stand where another cursor stood."""
        self.reset()
        self.last, self._zero = last, zero
        self._digests = array("Q", digests[-(last + 1) :])

    def check(self) -> None:
        """Assert what the digests promise."""
        assert self.last is None or self.last >= 0
        assert len(self._digests) <= self.expected

    def _trim(self) -> None:
        # what a replay brought beyond the newest live batch must stay comparable: a lying replay
        # endpoint would otherwise make the live copies look stale for ever
        unconfirmed = 0 if self._floor is None else self.expected - self._floor
        keep = max(REMEMBERED, min(unconfirmed, UNCONFIRMED_MAX))
        if len(self._digests) >= keep + REMEMBERED:  # not with every batch: it is a copy
            self._digests = self._digests[-keep:]
