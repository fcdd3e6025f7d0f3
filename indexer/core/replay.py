"""The rules of one replay: what it is for, how long it may take, how much it may send.

Only bookkeeping: whether a reply is applied is `stream`'s decision. A replay endpoint may be mute,
endless, garbled or simply wrong; every way it can waste our time has a budget here.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from indexer.types import StreamLimits


class Mode(Enum):
    """What a replay is for."""

    GAP = "gap"  # live batches are waiting for the ones before them
    POLL = "poll"  # nothing came for a while: was anything lost?
    VERIFY = "verify"  # the connection was gone for a while: is it still the same engine?
    REBUILD = "rebuild"  # the past has a hole: is it all still there, from number 0?


class ReplayRequest(Struct, frozen=True, eq=False):
    """A wish for a fresh replay from `start`; two wishes are two, even if they look alike."""

    start: int


class Replay:
    """A replay under way."""

    __slots__ = (
        "_limits",
        "attempts",
        "bytes",
        "deadline",
        "is_hearsay",
        "is_verified",
        "mode",
        "progressed",
        "quiet_until",
        "replies",
        "replies_now",
        "suspects",
        "useless",
        "waiting_before",
    )

    def __init__(self, mode: Mode, limits: StreamLimits, now: float) -> None:
        self.mode = mode
        self._limits = limits
        self.deadline = now + limits.replay_deadline_s
        self.attempts = 0  # in a row without progress
        self.replies = 0
        self.bytes = 0
        self.useless = 0
        self.is_hearsay = False  # it began where nothing was known that it could be compared with
        self.suspects = 0  # of those that wait: older than the last reconnect
        self.waiting_before = 0  # live batches that had come when the request went out
        self.begin_attempt(now)

    def begin_attempt(self, now: float) -> None:
        """A request goes out."""
        self.attempts += 1
        self.is_verified = False  # the engine has not shown yet that it is the one we know
        self.progressed = False
        self.replies_now = 0
        self.quiet_until = min(now + self._limits.replay_silence_s, self.deadline)

    def may_ask_again(self, now: float) -> bool:
        """Whether another request is worth it: always after progress, else a few times."""
        if self.progressed:
            self.attempts = 0
        return self.attempts < self._limits.replay_attempts_max and now < self.deadline

    def count(self, size: int) -> bool:
        """Count one reply; False when it is one too many."""
        self.replies += 1
        self.replies_now += 1
        self.bytes += size
        limits = self._limits
        return self.replies <= limits.replay_replies_max and self.bytes <= limits.replay_bytes_max

    def advance(self, now: float) -> None:
        """A reply was applied."""
        self.progressed = True
        self.hear(now)

    def hear(self, now: float) -> None:
        """The engine is there and answers."""
        self.quiet_until = min(now + self._limits.replay_silence_s, self.deadline)

    def excuse(self, seconds: float) -> None:
        """So much of the time was no silence: nobody was there to hear."""
        self.quiet_until = min(self.quiet_until + seconds, self.deadline)

    def waste(self) -> bool:
        """Count a reply that was of no use; False when it is one too many."""
        self.useless += 1
        return self.useless <= self._limits.replay_useless_max
