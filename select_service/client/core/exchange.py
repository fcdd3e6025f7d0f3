"""The words between the pure core and who carries them out.

A run of the core is a generator: it yields a `Send` or a `Sleep` and is sent the `Outcome`. The two
faces (`asynchronous.py`, `synchronous.py`) drive the same runs.
"""

from __future__ import annotations

from collections.abc import Generator
from enum import Enum
from typing import NamedTuple, TypeAlias, TypeVar

__all__ = ["Ask", "Command", "Failure", "Outcome", "Run", "Send", "Sleep", "Trail"]

T = TypeVar("T")


class Failure(Enum):
    """Why there is no answer."""

    REFUSED = "refused"  # nothing was sent: no connection
    BROKEN = "broken"  # the connection ended; whether the request was carried out is unknown
    SLOW = "slow"  # no answer in time; likewise
    TOO_LARGE = "too large"  # there is one, and more of it than is wanted
    STRANGE = "strange"  # there is one, and not a selection service's


class Ask(NamedTuple):
    """A request, whichever selector gets it."""

    method: str
    path: str
    body: dict[str, object] | None = None
    is_selection: bool = False  # which may wait in the service's queue
    accepts: tuple[int, ...] = ()  # statuses that are an answer like any other here


class Send(NamedTuple):
    """Send this, and say what came."""

    selector: int
    method: str
    path: str
    body: bytes
    content_type: str
    timeout_s: float  # longest silence
    whole_s: float  # until the end of the answer, however slowly it comes


class Sleep(NamedTuple):
    """Wait, and say what time it is."""

    seconds: float


class Outcome(NamedTuple):
    """An answer, or why there is none; after a `Sleep` only the time."""

    now: float
    status: int = 0
    body: bytes = b""
    content_type: str = ""
    retry_after_s: float | None = None
    failure: Failure | None = None
    reason: str = ""


Command: TypeAlias = Send | Sleep
Run: TypeAlias = Generator[Command, Outcome, T]


class Trail:
    """What one call has left behind at selectors; true at every moment, also when it is dropped."""

    __slots__ = ("in_flight", "selector", "was_slow", "was_unsure")

    def __init__(self) -> None:
        self.in_flight = False
        self.was_unsure = False  # an attempt was sent, and nobody knows what became of it
        self.was_slow = False
        self.selector = 0  # the last one asked

    @property
    def is_unsure(self) -> bool:
        """Something may have been carried out that we have no answer to."""
        return self.in_flight or self.was_unsure
