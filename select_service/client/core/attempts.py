"""Retries: attempts at one selector, then at the next, within a deadline.

Whether a request may be repeated is not decided here: every request carries an id chosen by the
client, and the service treats the same id with the same body as the same request. `session.py`
calls it; the clients carry out the attempts.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from select_service.client.core.codec import MSGPACK, encode
from select_service.client.core.exchange import (
    ExchangeOutcome,
    Failure,
    SelectorRequest,
    Send,
    Sleep,
    Trail,
)
from select_service.client.core.gateway_errors import as_received
from select_service.client.core.problems import code_of, is_unknown_model, never_fits

if TYPE_CHECKING:
    import random

    from select_service.client.core.exchange import Run
    from select_service.client.core.options import Options


class Prepare(Protocol):
    """Builds the request for a selector, possibly after requests of its own."""

    def __call__(self, selector: int, now: float, /) -> Run[SelectorRequest | ExchangeOutcome]:
        """Return the request, or the outcome of a preceding request that got no usable answer."""
        ...


class AttemptVerdict(Enum):
    """What to do after an outcome."""

    ANSWERED = "answered"  # including a refusal that time does not change
    AGAIN = "again"  # at the same selector, a few times
    LATER = "later"  # at the same selector, when it says
    ELSEWHERE = "elsewhere"  # this one cannot answer now; another may
    IN_JSON = "in JSON"  # it does not accept MessagePack


class ClientStats:
    """Counters of a client, since it was created."""

    __slots__ = (
        "degraded",
        "failovers",
        "lost_bookings",
        "operations_dropped",
        "replays",
        "requests",
        "retries",
        "upkeep_errors",
    )

    def __init__(self) -> None:
        self.requests = 0  # sent, whatever the outcome
        self.retries = 0  # requests repeated
        self.failovers = 0  # switches to another selector
        self.degraded = 0  # choices made without the service
        self.replays = 0  # bookings made again at a selector that did not know them
        self.lost_bookings = 0  # bookings that could not be made again: their worker is gone
        self.operations_dropped = 0  # lifecycle calls that the service refuses for good
        self.upkeep_errors = 0  # background turns that ended with an unexpected error

    def as_dict(self) -> dict[str, int]:
        """Return all counters by name."""
        return {name: getattr(self, name) for name in self.__slots__}


_LEAVING: Final = frozenset(
    (
        "shutting_down",
        "no_schedulable_worker",
        "too_many_connections",
        "state_unwritable",
        "state_disk_full",
        "state_stalled",
    )
)
_POINTLESS: Final = frozenset(("no_eligible_worker", "no_worker_for_role", "no_kv_transfer"))
_OF_STATUS: Final = {
    408: AttemptVerdict.AGAIN,
    429: AttemptVerdict.LATER,
    500: AttemptVerdict.ELSEWHERE,
    502: AttemptVerdict.AGAIN,
    504: AttemptVerdict.AGAIN,
}
_OF_FAILURE: Final = {
    Failure.REFUSED: AttemptVerdict.ELSEWHERE,
    Failure.TOO_LARGE: AttemptVerdict.ANSWERED,  # it would be as large again
    Failure.STRANGE: AttemptVerdict.ELSEWHERE,
}
_REFUSED, _UNSUPPORTED_MEDIA_TYPE, _BROKE, _NOT_NOW = 400, 415, 500, 503
_NOTHING_DONE: Final = frozenset((None, Failure.REFUSED))
_JITTER: Final = 0.25  # share of a stated wait, so that not all clients return at once


def verdict_on(
    outcome: ExchangeOutcome, *, in_msgpack: bool, accepts: tuple[int, ...] = ()
) -> AttemptVerdict:
    """Decide what to do after an outcome."""
    if outcome.failure is not None:
        return _OF_FAILURE.get(outcome.failure, AttemptVerdict.AGAIN)
    status = outcome.status
    if status < _REFUSED or status in accepts or never_fits(outcome):
        return AttemptVerdict.ANSWERED
    if status == _UNSUPPORTED_MEDIA_TYPE and in_msgpack:
        return AttemptVerdict.IN_JSON
    if status == _NOT_NOW:  # the code says why
        code = code_of(outcome)
        if code in _POINTLESS:
            return AttemptVerdict.ANSWERED
        return AttemptVerdict.ELSEWHERE if code in _LEAVING else AttemptVerdict.LATER
    # load shedding uses the status its operator chose, and says when to come again
    other = AttemptVerdict.ANSWERED if outcome.retry_after_s is None else AttemptVerdict.LATER
    return _OF_STATUS.get(status, other)


class Attempts:
    """The retry policy. One instance serves all calls of a client."""

    def __init__(self, options: Options, selectors: Selectors, rng: random.Random) -> None:
        self._options = options
        self._selectors = selectors
        self._rng = rng
        self.stats = ClientStats()

    def anywhere(
        self,
        prepare: Prepare,
        now: float,
        until: float,
        trail: Trail | None = None,
        *,
        rounds: int | None = None,
        attempts: int | None = None,
    ) -> Run[ExchangeOutcome]:
        """Ask the selectors in turn until one answers, or nothing more can be tried in time."""
        trail = Trail() if trail is None else trail
        selectors = self._selectors
        outcome = ExchangeOutcome(now, failure=Failure.SLOW, reason="no time was left")
        rounds = self._options.rounds_max if rounds is None else rounds
        for number in range(rounds):
            for _ in range(len(selectors)):
                selector = trail.selector = selectors.current
                ask = yield from prepare(selector, outcome.now)
                accepts: tuple[int, ...] = ()
                if isinstance(ask, SelectorRequest):
                    accepts = ask.accepts
                    outcome = yield from self.at(
                        selector, ask, outcome.now, until, trail, attempts=attempts
                    )
                else:
                    outcome = ask
                    trail.was_slow |= ask.failure is Failure.SLOW
                verdict = verdict_on(outcome, in_msgpack=False, accepts=accepts)
                if verdict in (AttemptVerdict.ANSWERED, AttemptVerdict.LATER):
                    selectors.worked(selector)
                    return outcome
                if outcome.now >= until:
                    return outcome
                if len(selectors) > 1:
                    self.stats.failovers += 1
                    selectors.failed(selector)
            if number + 1 == rounds or is_unknown_model(outcome):  # waiting is of no use
                break
            pause = self._between_rounds(number + 1, outcome)
            if outcome.now + pause >= until:
                break
            outcome = outcome._replace(now=(yield Sleep(pause)).now)
        if outcome.failure not in (None, Failure.STRANGE) and not trail.was_slow:
            selectors.is_down = True
        return outcome

    def at(
        self,
        selector: int,
        ask: SelectorRequest,
        now: float,
        until: float,
        trail: Trail,
        *,
        attempts: int | None = None,
    ) -> Run[ExchangeOutcome]:
        """Ask one selector until it answers or says that it will not soon."""
        tries = 0
        most = self._options.attempts_max if attempts is None else attempts
        while True:
            send = self._send(selector, ask, until - now)
            self.stats.requests += 1
            trail.in_flight = True
            outcome = as_received((yield send))
            trail.in_flight = False
            now = outcome.now
            trail.was_unsure |= outcome.failure not in _NOTHING_DONE or outcome.status == _BROKE
            trail.was_slow |= outcome.failure is Failure.SLOW
            verdict = verdict_on(
                outcome, in_msgpack=send.content_type == MSGPACK, accepts=ask.accepts
            )
            if verdict is AttemptVerdict.IN_JSON:
                self._selectors.json_only[selector] = True
                continue
            if verdict in (AttemptVerdict.ANSWERED, AttemptVerdict.ELSEWHERE):
                return outcome
            if verdict is AttemptVerdict.AGAIN:
                tries += 1
                if tries >= most:
                    return outcome
                pause = self._backoff(tries)
            elif not self._options.retry_refused:
                return outcome
            else:
                wait_s = outcome.retry_after_s or self._options.backoff_max_ms / 1e3
                pause = wait_s * (1.0 + _JITTER * self._rng.random())
            if now + pause >= until:
                return outcome
            self.stats.retries += 1
            now = (yield Sleep(pause)).now

    def pause_before(self, tries: int, outcome: ExchangeOutcome) -> float | None:
        """Return the wait after `tries` attempts at a selector; None: do not try again."""
        if verdict_on(outcome, in_msgpack=False) is not AttemptVerdict.AGAIN:
            return None
        return None if tries >= self._options.attempts_max else self._backoff(tries)

    def _send(self, selector: int, ask: SelectorRequest, left_s: float) -> Send:
        body, content_type = encode(ask.body, json_only=self._selectors.json_only[selector])
        options = self._options
        longest = options.selection_timeout_ms if ask.is_selection else options.attempt_timeout_ms
        whole_s = max(0.001, left_s)
        timeout_s = min(longest / 1e3, whole_s)
        if ask.method != "GET":  # answers to changes are short, and their callers wait for them
            whole_s = timeout_s
        return Send(selector, ask.method, ask.path, body, content_type, timeout_s, whole_s)

    def _between_rounds(self, number: int, outcome: ExchangeOutcome) -> float:
        """Return the wait after a round; infinite: the refusal is returned to the caller."""
        if outcome.retry_after_s is not None and not self._options.retry_refused:
            return math.inf
        return outcome.retry_after_s or self._backoff(number)

    def _backoff(self, tries: int) -> float:
        """Return a random part of an exponential wait; never zero, so that others get a turn."""
        longest = min(
            self._options.backoff_ms * 2.0 ** min(tries, 16), self._options.backoff_max_ms
        )
        return longest * (0.1 + 0.9 * self._rng.random()) / 1e3


def always(ask: SelectorRequest) -> Prepare:
    """Return a preparation for a request that is the same at every selector."""

    def prepare(_selector: int, _now: float, /) -> Run[SelectorRequest | ExchangeOutcome]:
        yield from ()  # makes this a generator
        return ask

    return prepare


class Selectors:
    """Sticky: the current selector is used until it fails, then the next one, in a circle."""

    __slots__ = ("current", "is_down", "json_only", "moves")

    def __init__(self, count: int, *, msgpack: bool) -> None:
        if count < 1:
            raise ValueError("a client needs at least one selector")
        self.current = 0
        self.is_down = False  # a round over all of them has brought no answer
        self.json_only = [not msgpack] * count
        self.moves = 0

    def __len__(self) -> int:
        return len(self.json_only)

    def worked(self, selector: int) -> None:
        """Note an answer; if all were down, that selector becomes the current one."""
        if self.is_down:
            self.is_down = False
            self.current = selector

    def failed(self, selector: int) -> None:
        """Move on to the next selector, unless another call already has."""
        if selector == self.current and len(self) > 1:
            self.current = (selector + 1) % len(self)
            self.moves += 1
