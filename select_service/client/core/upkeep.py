"""The background work of a client.

It sends lifecycle calls, renews leases, books lost reservations again, probes selectors that were
down, and reads the catalog: one run at a time. `session.py` has the state; the clients drive the
runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from select_service.client.core.attempts import always
from select_service.client.core.codec import decode
from select_service.client.core.exchange import ExchangeOutcome, SelectorRequest, Sleep, Trail
from select_service.client.core.problems import ClientError, NotAnAnswer
from select_service.client.core.session import renewing
from select_service.errors import ServiceError
from select_service.types import BatchAnswer

if TYPE_CHECKING:
    from select_service.client.core.booking import ClientBooking
    from select_service.client.core.exchange import Run
    from select_service.client.core.lease_book import ClientLease
    from select_service.client.core.session import ClientSession
    from select_service.types import OperationResult

_OK: Final = 200
_CREATED: Final = 201
_REFUSED: Final = 400
_NOT_FOUND: Final = 404
_TRY_AGAIN: Final = frozenset((401, 408, 429, 500, 502, 503, 504))  # 401: until the next token
_PAUSE_S: Final = 0.2  # pause after a failure
_NEVER: Final = float("inf")


class _Renewed(Struct, frozen=True):
    """The part of the answer to a renewal that is used."""

    reservations: int


class SessionUpkeep:
    """The background of one session."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._options = session.options
        self._paused_until = 0.0
        self._probe_at = 0.0
        self._read_at = 0.0 if session.options.degraded else _NEVER

    def due(self) -> float:
        """When `turn` has something to do; infinity if never."""
        session = self._session
        if session.selectors.is_down:
            return self._probe_at
        at = min(self._read_at, session.leases.due(session.selectors.current))
        outbox = session.outbox
        if outbox.since is not None:
            window = 0.0 if outbox.is_full else self._options.batch_window_ms / 1e3
            at = min(at, outbox.since + window)
        if session.lost:
            at = 0.0
        return max(at, self._paused_until)

    def pause(self, now: float) -> None:
        """Postpone the next turn a little, because one failed."""
        self._paused_until = now + _PAUSE_S

    def turn(self, now: float) -> Run[None]:
        """Do what is due; what fails is tried again a little later."""
        try:
            yield from self._turn(now)
        except (ClientError, ServiceError):  # for example, it is not a selection service
            self.pause(now)

    def _turn(self, now: float) -> Run[None]:
        session = self._session
        if session.selectors.is_down:
            now = yield from self._probe(now)
            if session.selectors.is_down:
                return
        now = yield from self._renew(now)
        now = yield from self._replay(now)
        if session.outbox.since is not None:
            now = yield from self._flush(now, now + self._short)
        now = yield from self._close_leases(now)
        if now >= self._read_at:
            self._read_at = now + self._options.catalog_refresh_s
            try:
                yield from session.refresh_catalog(now, self._short)
            except ServiceError:  # perhaps a token without read permission
                pass
            except ClientError:
                self._read_at = now + self._options.probe_s  # keep the last catalog

    def farewell(self, now: float) -> Run[None]:
        """Send what is still pending, then close every lease with whatever is under it."""
        session = self._session
        until = now + self._options.close_timeout_ms / 1e3
        self._paused_until = 0.0
        while len(session.outbox) and now < until and not session.selectors.is_down:
            session.lost.clear()
            before = now
            now = yield from self._flush(now, until)
            if len(session.outbox) and now < until:
                now = (yield Sleep(max(0.0, min(_PAUSE_S - (now - before), until - now)))).now
        leases = session.leases
        for lease in (leases.current, *leases.old):
            if lease is not None and lease.selector is not None and now < until:
                ask = SelectorRequest("DELETE", f"/leases/{lease.lease_id}")
                outcome = yield from session.attempts.at(lease.selector, ask, now, until, Trail())
                now = outcome.now

    @property
    def _short(self) -> float:
        """Time for one background call; others wait behind it."""
        return 3.0 * self._options.attempt_timeout_ms / 1e3

    def _probe(self, now: float) -> Run[float]:
        self._probe_at = now + self._options.probe_s
        outcome = yield from self._session.attempts.anywhere(
            always(SelectorRequest("GET", "/health")), now, now + self._short, rounds=1, attempts=1
        )
        if outcome.failure is None:
            self._session.selectors.is_down = False
        self._probe_at = outcome.now + self._options.probe_s
        return outcome.now

    # -- reporting -----------------------------------------------------------------------------

    def _flush(self, now: float, until: float) -> Run[float]:
        session, outbox = self._session, self._session.outbox
        operations = outbox.take(session.lost)
        if not operations:
            outbox.settle()
            return now
        ask = SelectorRequest("POST", "/reservations/batch", {"operations": operations})
        is_reported = is_refused = False
        try:
            outcome = yield from session.attempts.anywhere(always(ask), now, until)
            now = outcome.now
            if outcome.status == _OK:
                results = decode(outcome, BatchAnswer).results
                if len(results) != len(operations):
                    raise NotAnAnswer(f"{len(operations)} operations, {len(results)} results")
                is_reported = True
                self._read_results(operations, results, now)
            elif outcome.status >= _REFUSED and outcome.status not in _TRY_AGAIN:
                is_refused = True
        finally:  # also if the run is dropped half-way
            if is_reported:
                outbox.settle()
            elif is_refused:
                session.stats.operations_dropped += outbox.refused(now)
            else:
                outbox.put_back(now)
                self._paused_until = now + _PAUSE_S
        return now

    def _read_results(
        self, operations: list[dict[str, object]], results: list[OperationResult], now: float
    ) -> None:
        session = self._session
        for operation, result in zip(operations, results, strict=True):
            if result.status < _REFUSED:
                continue
            name = str(operation["reservation_id"])
            if result.status in _TRY_AGAIN:
                session.outbox.put_back_one(name, now)
                self._paused_until = now + _PAUSE_S
            elif result.status != _NOT_FOUND:
                session.stats.operations_dropped += 1
            elif operation["op"] != "free":
                booking = session.bookings.get(name)
                if booking is not None:  # unknown there: a restart, or another selector
                    session.lost[name] = booking

    # -- leases --------------------------------------------------------------------------------

    def _renew(self, now: float) -> Run[float]:
        session = self._session
        while (lease := session.leases.to_renew(session.selectors.current, now)) is not None:
            trail = Trail()
            under = self._under(lease)
            outcome = yield from session.attempts.anywhere(
                always(renewing(lease)), now, now + self._short, trail
            )
            now = outcome.now
            if outcome.status == _OK:
                self._compare(under, lease, outcome)
                lease.selector, lease.renewed_at = trail.selector, now
                for name in lease.ghosts:
                    session.outbox.entry(name, now).is_freed = True
            elif outcome.status == _NOT_FOUND:
                session.lose(lease)
            else:
                self._paused_until = now + _PAUSE_S
                break
        return now

    def _under(self, lease: ClientLease) -> list[ClientBooking]:
        bookings = self._session.bookings.values()
        return [booking for booking in bookings if booking.draft.lease is lease]

    def _compare(
        self, before: list[ClientBooking], lease: ClientLease, outcome: ExchangeOutcome
    ) -> None:
        """If the service has fewer bookings under the lease than we do, ask about each of them."""
        under = [one for one in before if not one.is_over and one.draft.lease is lease]
        if decode(outcome, _Renewed).reservations >= sum(one.legs for one in under):
            return
        for booking in under:
            entry = self._session.outbox.entry(booking.reservation_id, outcome.now)
            entry.is_question = True
            entry.blocks = booking.output_blocks

    def _close_leases(self, now: float) -> Run[float]:
        leases = self._session.leases
        leases.rotate(now)
        while (lease := leases.to_close()) is not None:
            outcome = yield from self._session.attempts.anywhere(
                always(SelectorRequest("DELETE", f"/leases/{lease.lease_id}")),
                now,
                now + self._short,
            )
            now = outcome.now
            if outcome.failure is not None or outcome.status in _TRY_AGAIN:
                self._paused_until = now + _PAUSE_S
                break
            if lease in leases.old:
                leases.old.remove(lease)
        return now

    # -- booking again -------------------------------------------------------------------------

    def _replay(self, now: float) -> Run[float]:
        session = self._session
        for name in list(session.lost)[: self._options.replays_per_turn_max]:
            booking = session.lost.get(name)
            if booking is None:
                continue
            if booking.facts() is None:
                self._give_up(name, booking)
                continue
            outcome = yield from self._rebook(name, booking, now)
            now = outcome.now
            if outcome.failure is not None or outcome.status in _TRY_AGAIN:
                self._paused_until = now + _PAUSE_S
                break
        return now

    def _rebook(self, name: str, booking: ClientBooking, now: float) -> Run[ExchangeOutcome]:
        """Book the same rank again under a new id; the worker's answer may be on its way."""
        session, draft = self._session, booking.draft
        until = now + self._short
        lease = yield from session.under_lease(session.selectors.current, now, until)
        if isinstance(lease, ExchangeOutcome):
            return lease
        if name not in session.lost:  # it has ended meanwhile
            return ExchangeOutcome(now)
        self._rename(name, booking, lease, now)
        trail = Trail()
        ask = SelectorRequest("POST", "/reservations", booking.facts())
        try:
            outcome = yield from session.attempts.anywhere(always(ask), now, until, trail)
        finally:
            if trail.is_unsure:
                self._doubt(booking, lease)
        name = draft.reservation_id
        if booking.is_over:  # during the attempt: a pending entry frees it
            return outcome
        if outcome.status in (_OK, _CREATED):
            if lease is None or session.leases.knows(lease):
                session.lost.pop(name, None)
            session.stats.replays += 1
            self._report_again(booking, outcome.now)
        elif outcome.failure is None and outcome.status not in _TRY_AGAIN:
            if outcome.status == _NOT_FOUND and lease is not None and self._has_ended(outcome):
                session.lose(lease)
                return outcome
            self._give_up(name, booking)
        return outcome

    @staticmethod
    def _doubt(booking: ClientBooking, lease: ClientLease | None) -> None:
        booking.is_unsure = True
        if lease is not None and booking.is_over:  # `end` could not know yet
            lease.doubt(booking.reservation_id)
        elif lease is not None:
            lease.is_doubtful = True

    def _give_up(self, name: str, booking: ClientBooking) -> None:
        """Stop trying to book again: the worker is gone, or it is a pair."""
        session, lease = self._session, booking.draft.lease
        if lease is not None:  # it may still be booked at another selector
            lease.doubt(name)
        session.lost.pop(name, None)
        session.bookings.pop(name, None)
        session.outbox.drop(name)
        booking.is_booked = False
        booking.draft.use(None)
        session.stats.lost_bookings += 1

    @staticmethod
    def _has_ended(outcome: ExchangeOutcome) -> bool:
        return b"lease_" in outcome.body

    def _rename(
        self, name: str, booking: ClientBooking, lease: ClientLease | None, now: float
    ) -> None:
        session, draft = self._session, booking.draft
        if booking.is_unsure and draft.lease is not None:
            draft.lease.doubt(name)
        del session.bookings[name], session.lost[name]
        draft.number += 1
        draft.use(lease)
        session.bookings[draft.reservation_id] = session.lost[draft.reservation_id] = booking
        session.outbox.rename(name, draft.reservation_id)
        session.outbox.entry(name, now).is_freed = True  # in case it is known after all

    def _report_again(self, booking: ClientBooking, now: float) -> None:
        if booking.output_blocks:
            entry = self._session.outbox.entry(booking.reservation_id, now)
            entry.blocks = booking.output_blocks
