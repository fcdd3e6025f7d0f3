"""The rules of one replay: its purpose, how long it may take, how much it may send.

Only bookkeeping: `repair` decides whether a reply is applied. A replay endpoint may be mute,
endless, garbled or simply wrong; every way it can waste our time has a budget here.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from indexer.types import StreamLimits


SKIPPED_MAX: Final = 8
"""Batches that break the connection, in one replay; each costs some requests."""


class Mode(Enum):
    """The purpose of a replay."""

    GAP = "gap"  # live batches are waiting for earlier ones
    POLL = "poll"  # silence: were the last batches lost?
    VERIFY = "verify"  # the connection was interrupted: is it still the same engine?
    PROBE = "probe"  # it contradicts the past: does it at least repeat what was just heard live?
    REBUILD = "rebuild"  # batches were lost for good: is everything from number 0 still available?


class Staged(NamedTuple):
    """One batch of a rebuild: not applied before the rebuild has proven to be right."""

    payload: bytes | None  # None: it breaks the connection, it cannot be read
    digest: int
    is_heard: bool  # it came live, too, or batches after it did


class ReplayRequest(Struct, frozen=True, eq=False):
    """A request for a fresh replay from `start`; two equal requests are still two."""

    start: int


class StreamReplay:
    """A replay in progress."""

    def __init__(self, mode: Mode, limits: StreamLimits, now: float) -> None:
        self.mode = mode
        self._limits = limits
        self.deadline = now + limits.replay_deadline_s
        self.attempts = 0  # consecutive ones without progress
        self.replies = 0
        self.bytes = 0
        self.useless = 0
        self.staged: deque[Staged] = deque()  # what a rebuild has brought, from batch 0 on
        self.staged_bytes = 0
        self.is_of_another = False  # it differs from what was heard before the doubt
        self.is_reread = False  # what was heard is in doubt itself, because predictions fail
        # number and digest of a live batch that it has to repeat, where it contradicts the past
        self.target: tuple[int, int] | None = None
        self.is_hearsay = False  # began with nothing known that it could be compared with
        self.behind: int | None = None  # ask from here on: what comes before breaks the connection
        self.skipped = 0  # batches that did
        self.suspects = 0  # how many of the waiting batches are older than the last reconnect
        self.waiting_before = 0  # live batches already waiting when the request was sent
        self.begin_attempt(now)

    def begin_attempt(self, now: float) -> None:
        """Note that a request is sent."""
        self.attempts += 1
        self.is_verified = False  # the engine has not yet proven to be the one we know
        self.progressed = False
        self.replies_now = 0
        self.quiet_until = min(now + self._limits.replay_silence_s, self.deadline)

    def may_skip(self, now: float) -> bool:
        """Whether the endpoint may be asked for what comes behind a batch that breaks connections.

        One that never replied may not even speak ZMQ.
        """
        most = SKIPPED_MAX if self.replies else 1
        return self.skipped < most and now < self.deadline

    def may_ask_again(self, now: float) -> bool:
        """Whether another request is allowed: always after progress, otherwise a few times."""
        if self.progressed:
            self.attempts = 0
        return self.attempts < self._limits.replay_attempts_max and now < self.deadline

    def count(self, size: int) -> bool:
        """Count one reply; False if the budget is exceeded."""
        self.replies += 1
        self.replies_now += 1
        self.bytes += size
        limits = self._limits
        return self.replies <= limits.replay_replies_max and self.bytes <= limits.replay_bytes_max

    def stage(self, one: Staged) -> bool:
        """Keep the next batch of a rebuild; False if the budget is exceeded."""
        self.staged.append(one)
        self.staged_bytes += 0 if one.payload is None else len(one.payload)
        return self.staged_bytes <= self._limits.rebuild_bytes_max

    def unstage(self) -> None:
        """Drop what a rebuild has brought: it begins again with batch 0."""
        self.staged.clear()
        self.staged_bytes = 0
        self.is_of_another = False
        self.target = None

    def advance(self, now: float) -> None:
        """Note that a reply was applied."""
        self.progressed = True
        self.hear(now)

    def hear(self, now: float) -> None:
        """Note that the engine answers."""
        self.quiet_until = min(now + self._limits.replay_silence_s, self.deadline)

    def excuse(self, seconds: float) -> None:
        """Do not count these seconds as silence: we were not listening."""
        self.quiet_until = min(self.quiet_until + seconds, self.deadline)

    def waste(self) -> bool:
        """Count a useless reply; False if the budget is exceeded."""
        self.useless += 1
        return self.useless <= self._limits.replay_useless_max
