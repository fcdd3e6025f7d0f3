"""The vocabulary between the pure core and the clients that carry out its commands.

A run of the core is a generator: it yields a `Send` or a `Sleep` and is sent the `ExchangeOutcome`.
Both clients (`asynchronous.py`, `synchronous.py`) drive the same runs.
"""

from __future__ import annotations

from collections.abc import Generator
from enum import Enum
from typing import NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")


class Failure(Enum):
    """Why there is no answer."""

    REFUSED = "refused"  # nothing was sent: no connection
    BROKEN = "broken"  # the connection broke; whether the request was carried out is unknown
    SLOW = "slow"  # no answer in time; likewise unknown
    TOO_LARGE = "too large"  # the answer exceeds the limit
    STRANGE = "strange"  # the answer is not from a selection service


class SelectorRequest(NamedTuple):
    """A request to any selector."""

    method: str
    path: str
    body: dict[str, object] | None = None
    is_selection: bool = False  # it may wait in the service's queue
    accepts: tuple[int, ...] = ()  # error statuses that count as answers here


class Send(NamedTuple):
    """Send a request and return the outcome."""

    selector: int
    method: str
    path: str
    body: bytes
    content_type: str
    timeout_s: float  # longest silence
    whole_s: float  # until the end of the answer, however slowly it arrives


class Sleep(NamedTuple):
    """Wait and return the time."""

    seconds: float


class ExchangeOutcome(NamedTuple):
    """An answer, or why there is none; after a `Sleep` only the time."""

    now: float
    status: int = 0
    body: bytes = b""
    content_type: str = ""
    retry_after_s: float | None = None
    failure: Failure | None = None
    reason: str = ""


Command: TypeAlias = Send | Sleep
Run: TypeAlias = Generator[Command, ExchangeOutcome, T]


class Trail:
    """What one call may have left at selectors; always valid, even if the call is dropped."""

    __slots__ = ("in_flight", "selector", "was_slow", "was_unsure")

    def __init__(self) -> None:
        self.in_flight = False
        self.was_unsure = False  # an attempt was sent, and its outcome is unknown
        self.was_slow = False
        self.selector = 0  # the last one asked

    @property
    def is_unsure(self) -> bool:
        """Whether something may have been carried out without our having the answer."""
        return self.in_flight or self.was_unsure
