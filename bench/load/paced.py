"""The open-loop client: operations start when they are due, whether or not others have ended.

A user's requests do not wait for each other, so neither do these: an operation that is due takes an
idle connection or opens one. What a request took is counted from its sending, and from when it was
due if every connection was taken. How late this client itself was is reported beside it.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from bench.load.http import SILENCE_MAX_S, BadAnswer, Line, connect, receive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.load.http import Answer, Operation

__all__ = ["Meanwhile", "Paced", "Schedule", "Stream", "drive_paced", "percentile"]

_CONNECTIONS_MAX = 64
_STREAM_BURST = 8  # messages sent before answers are looked at again: some 100 µs


@dataclass(frozen=True, slots=True)
class Schedule:
    """`count` things, `rate` a second, the first at `start`; all times of one clock."""

    start: float
    rate: float
    count: int

    def due_at(self, number: int) -> float:
        """When a thing (from 0) is due."""
        return self.start + number / self.rate

    @property
    def end(self) -> float:
        """When the one after the last would be due."""
        return self.due_at(self.count)


class Meanwhile(Protocol):
    """Something else that is to happen at its own times while operations go on."""

    def go_on(self, now: float) -> float:
        """Do some of what is due; return when to be called again, infinity when all is done."""


@dataclass(slots=True)
class Stream:
    """Sends prepared messages at an even rate."""

    schedule: Schedule
    send: Callable[[int], None]
    sent: int = 0
    late_s: float = 0.0  # at worst

    def go_on(self, now: float) -> float:
        """Send what is due, a few at a time."""
        last = min(self.sent + _STREAM_BURST, self.schedule.count)
        while self.sent < last and (due := self.schedule.due_at(self.sent)) <= now:
            self.late_s = max(self.late_s, now - due)
            self.send(self.sent)
            self.sent += 1
        return self.schedule.due_at(self.sent) if self.sent < self.schedule.count else float("inf")


@dataclass(slots=True)
class Paced:
    """What came of it: per step of the operations, how long each took; how late they began."""

    answered_s: dict[int, list[float]] = field(default_factory=dict)
    late_s: list[float] = field(default_factory=list)
    operations: int = 0
    realtime: bool = False  # whether the client ran ahead of all others


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of all do not exceed, between two neighbours if need be.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(slots=True)
class _Client:
    address: tuple[str, int]
    check: Callable[[Answer], None]
    done: Paced = field(default_factory=Paced)
    idle: list[Line] = field(default_factory=list)
    busy: dict[int, Line] = field(default_factory=dict)
    sent_at: dict[int, float] = field(default_factory=dict)

    def can_start(self) -> bool:
        return bool(self.idle) or len(self.busy) < _CONNECTIONS_MAX

    def start(self, number: int, steps: Operation, due: float) -> None:
        line = self.idle.pop() if self.idle else Line(connect(self.address))
        line.operation, line.steps, line.step = number, steps, 0
        had_to_wait = len(self.busy) == _CONNECTIONS_MAX - 1
        now = time.perf_counter()
        self.done.late_s.append(now - due)
        self._send(line, due if had_to_wait else now)

    def take(self, descriptor: int) -> None:
        line = self.busy[descriptor]
        answer = receive(line)
        if answer is None:
            return
        now = time.perf_counter()
        taken = now - self.sent_at.pop(descriptor)
        del self.busy[descriptor]
        self.check(answer)
        self.done.answered_s.setdefault(line.step, []).append(taken)
        line.step += 1
        if line.step < len(line.steps):
            self._send(line, time.perf_counter())
        else:
            self.done.operations += 1
            self.idle.append(line)

    def close(self) -> None:
        for line in [*self.idle, *self.busy.values()]:
            line.socket.close()

    def _send(self, line: Line, since: float) -> None:
        descriptor = line.socket.fileno()
        self.sent_at[descriptor] = since
        self.busy[descriptor] = line
        line.socket.sendall(line.steps[line.step])


def drive_paced(
    address: tuple[str, int],
    operation: Callable[[int], Operation],
    check: Callable[[Answer], None],
    schedule: Schedule,
    *,
    first: int = 0,
    meanwhile: Meanwhile | None = None,
    enough: Callable[[], bool] | None = None,
) -> Paced:
    """Start `operation(first + i)` when the i-th of the schedule is due; check every answer.

    Returns when every operation that was started is answered and `meanwhile` has ended. `enough`
    ends the schedule before its time.

    Raises:
        BadAnswer: from `check`, or when the server is silent for too long or hangs up.
    """
    client = _Client(address, check)
    started, count = 0, schedule.count
    again = float("-inf") if meanwhile is not None else float("inf")
    with closing(client), _ahead_of_others() as client.done.realtime:
        while True:
            now = time.perf_counter()
            if enough is not None and enough():
                count = started
            while started < count and schedule.due_at(started) <= now and client.can_start():
                number = first + started
                client.start(number, operation(number), schedule.due_at(started))
                started += 1
            if meanwhile is not None and again <= now:
                again = meanwhile.go_on(now)
            if started == count and not client.busy and again == float("inf"):
                break
            wake = again
            if started < count and client.can_start():
                wake = min(wake, schedule.due_at(started))
            now = time.perf_counter()
            if client.busy and now - min(client.sent_at.values()) > SILENCE_MAX_S:
                raise BadAnswer(f"no answer for {SILENCE_MAX_S:.0f} s")
            # select(2) and not epoll(7): that one sleeps in whole milliseconds
            ready, _, _ = select.select(
                list(client.busy), [], [], min(max(0.0, wake - now), SILENCE_MAX_S)
            )
            for descriptor in ready:
                client.take(descriptor)
    return client.done


@contextmanager
def _ahead_of_others() -> Iterator[bool]:
    """Run this thread, which sleeps most of the time, as soon as it has something to do.

    Otherwise a server that keeps a core busy delays the very clock it is measured by: this client
    then looks at an answer when the scheduler's slice of that server is over, up to 4 ms later.
    Yields False where that is not allowed.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
