"""The client without its sockets: bookings, leases, pending calls, and which selector to ask.

Every verb is a run (`exchange.py`) that a client drives. State changes between two steps are
atomic, so threaded clients hold one lock around each step. `upkeep.py` does the background work.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from select_service.client.core.attempts import Attempts, Selectors, always
from select_service.client.core.booking import ClientBooking, Draft
from select_service.client.core.booking_kinds import booking_of, choosing, chosen, pairing
from select_service.client.core.codec import CatalogWorker, decode
from select_service.client.core.exchange import (
    ExchangeOutcome,
    Failure,
    SelectorRequest,
    Sleep,
    Trail,
)
from select_service.client.core.fallback import FallbackCatalog, scope_of
from select_service.client.core.lease_book import LeaseBook
from select_service.client.core.problems import (
    ClientClosed,
    NotCached,
    code_of,
    raise_unless_answered,
)
from select_service.client.core.prompts import Prompts
from select_service.client.core.report_outbox import ReportOutbox
from select_service.types import OUTCOMES, CacheThreshold

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from typing import SupportsFloat, SupportsIndex

    from select_service.client.core.booking_kinds import BookingKind
    from select_service.client.core.exchange import Run
    from select_service.client.core.lease_book import ClientLease
    from select_service.client.core.options import Options
    from select_service.types import Outcome, Selection


T = TypeVar("T")

_OK: Final = 200
_CREATED: Final = 201
_NOT_FOUND: Final = 404
_U64: Final = 1 << 64
_REOPENED: Final = "lease_reopened"
_LEASE_TRIES: Final = 3  # attempts with a new lease if one ends during a booking


class ClientSession:
    """All state of a client."""

    def __init__(
        self,
        names: Sequence[str],
        options: Options,
        *,
        owner: str,
        rng: random.Random,
        new_id: Callable[[], str],
        hash_prompt: Callable[..., dict[str, object]],
        on_work: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin empty.

        Args:
            names: of the selectors, in order, for messages.
            options: limits.
            owner: of the leases.
            rng: for backoff and degraded choices.
            new_id: returns an unused id.
            hash_prompt: hashes tokens as the service does.
            on_work: called when `upkeep` has something to do earlier than it returned.
        """
        self.names = ", ".join(names)
        self.options = options
        self.owner = owner
        self.new_id = new_id
        self.rng = rng
        self.selectors = Selectors(len(names), msgpack=options.msgpack)
        self.attempts = Attempts(options, self.selectors, rng)
        self.stats = self.attempts.stats
        self.leases = LeaseBook(options, new_id)
        self.outbox = ReportOutbox(on_work, options.batch_operations_max)
        self.catalog = FallbackCatalog(options.catalog_workers_max)
        self.bookings: dict[str, ClientBooking] = {}  # live and booked, by id
        self.lost: dict[
            str, ClientBooking
        ] = {}  # to be booked again; nothing is sent about them yet
        self.is_closed = False
        self.prompts = Prompts(options, self.catalog, hash_prompt, self.refresh_catalog)
        self.on_work = on_work

    @property
    def is_settled(self) -> bool:
        """Whether everything has been reported, and every live reservation is booked."""
        return not len(self.outbox) and not self.lost

    # -- any call ------------------------------------------------------------------------------

    def ask(
        self, ask: SelectorRequest, now: float, timeout_s: float | None = None
    ) -> Run[ExchangeOutcome]:
        """Ask any selector.

        Raises:
            ServiceError: it refuses.
            ClientError: no selector answers.
        """
        self._check_open()
        until = now + (self.options.timeout_ms / 1e3 if timeout_s is None else timeout_s)
        outcome = yield from self.attempts.anywhere(always(ask), now, until)
        if outcome.status not in ask.accepts:
            raise_unless_answered(outcome, self.names)
        return outcome

    def read(
        self, ask: SelectorRequest, kind: type[T], now: float, timeout_s: float | None
    ) -> Run[T]:
        """Ask, and decode the answer as a type."""
        outcome = yield from self.ask(ask, now, timeout_s)
        return decode(outcome, kind)

    def select(self, prompt: dict[str, Any], now: float, timeout_s: float | None) -> Run[Selection]:
        """POST /select: choose a worker for a prompt; nothing is booked.

        Raises:
            ServiceError: the service refuses.
            NotCached: no rank holds enough of the prompt.
            ClientError: no selector answers.
        """
        prompt = yield from self.prompts.hashed(prompt, now, timeout_s)
        ask = SelectorRequest("POST", "/select", prompt, is_selection=True)
        outcome = yield from self.ask(ask, now, timeout_s)
        answer = chosen(outcome)
        if isinstance(answer, CacheThreshold):
            raise NotCached(answer)
        return answer

    # -- bookings ------------------------------------------------------------------------------

    def reserve(
        self, prompt: dict[str, Any], reservation_id: str, now: float, timeout_s: float | None
    ) -> Run[ClientBooking]:
        """POST /select_and_reserve: choose and book."""
        booking_kind = choosing(self.catalog, self.rng, prompt)
        return self._make(booking_kind, prompt, reservation_id, now, timeout_s)

    def reserve_pair(
        self, prompt: dict[str, Any], reservation_id: str, now: float, timeout_s: float | None
    ) -> Run[ClientBooking]:
        """POST /select_pair: choose one rank or two and book them."""
        booking_kind = pairing(self.catalog, self.rng, prompt)
        return self._make(booking_kind, prompt, reservation_id, now, timeout_s)

    def book(
        self,
        body: dict[str, Any],
        reservation_id: str,
        now: float,
        timeout_s: float | None,
        *,
        block_size: int | None,
    ) -> Run[ClientBooking]:
        """POST /reservations: book a rank that was chosen elsewhere.

        Raises:
            BlockSizeUnknown: it is neither given nor in the catalog.
        """
        self._check_open()
        if block_size is None:
            block_size = yield from self.prompts.block_size(scope_of(body), now, timeout_s)
        booking_kind = booking_of(self.catalog, body, block_size)
        return (yield from self._make(booking_kind, body, reservation_id, now, timeout_s))

    def _make(
        self,
        booking_kind: BookingKind,
        prompt: dict[str, Any],
        reservation_id: str,
        now: float,
        timeout_s: float | None,
    ) -> Run[ClientBooking]:
        """Make a booking. If it fails, anything possibly left behind is freed.

        Raises:
            ServiceError: the service refuses.
            NotCached: no rank holds enough of the prompt.
            ClientError: no selector answers, and there is no catalog to choose from.
        """
        self._check_open()
        until = now + (self.options.timeout_ms / 1e3 if timeout_s is None else timeout_s)
        draft, trail = Draft(reservation_id), Trail()
        if self.outbox.has(reservation_id):  # its previous use is still being ended
            draft.number = 1
        self.leases.forget_ghost(reservation_id)
        if self.selectors.is_down and self.options.degraded:
            booking = self._degrade(booking_kind, draft)
            if booking is not None:
                return booking
        is_booked = is_owed = False
        try:
            prompt = yield from self.prompts.hashed(prompt, now, until - now)
            outcome = yield from self._ask_for(booking_kind, prompt, draft, (now, until), trail)
            if self._is_nobody_there(outcome, trail):
                booking = self._degrade(booking_kind, Draft(reservation_id))
                if booking is not None:
                    return booking
            raise_unless_answered(outcome, self.names)
            is_owed = True
            answer = booking_kind.read(outcome)
            if isinstance(answer, CacheThreshold):
                is_owed = False
                raise NotCached(answer)
            is_booked = True
        finally:
            if trail.is_unsure and draft.lease is not None:
                draft.lease.is_doubtful = True
                self.on_work()
            if not is_booked:
                self._abandon(draft, now, is_owed=is_owed or trail.is_unsure)
        booking = ClientBooking(draft, answer, is_degraded=False)
        booking.terms = None if booking_kind.again is None else {**prompt, **booking_kind.again}
        booking.is_unsure = trail.is_unsure
        self.bookings[booking.reservation_id] = booking
        if draft.lease is not None and not self.leases.knows(draft.lease):
            # other bookings have moved to another lease meanwhile
            self.lost[booking.reservation_id] = booking
            self.on_work()
        self.catalog.begin(booking.ranks)
        return booking

    def _is_nobody_there(self, outcome: ExchangeOutcome, trail: Trail) -> bool:
        """Whether to choose locally. A selector that is merely slow may have a queue."""
        if (
            outcome.failure in (None, Failure.TOO_LARGE, Failure.STRANGE)
            or not self.options.degraded
        ):
            return False
        return self.selectors.is_down or not trail.was_slow

    def _ask_for(
        self,
        booking_kind: BookingKind,
        prompt: dict[str, Any],
        draft: Draft,
        times: tuple[float, float],
        trail: Trail,
    ) -> Run[ExchangeOutcome]:
        now, until = times

        def prepare(selector: int, now: float, /) -> Run[SelectorRequest | ExchangeOutcome]:
            held = draft.lease
            if held is not None and held.selector == selector and self.leases.knows(held):
                found: ClientLease | ExchangeOutcome | None = (
                    held  # even if replaced: the body stays the same
                )
            else:
                found = yield from self.under_lease(selector, now, until)
            if isinstance(found, ExchangeOutcome):
                return found
            if draft.selector not in (None, selector):
                self._abandon(draft, now, is_owed=trail.is_unsure)
                draft.number += 1
            draft.selector = selector
            draft.use(found)
            body = {**prompt, "reservation_id": draft.reservation_id}
            if found is not None:
                body["lease_id"] = found.lease_id
            return SelectorRequest(
                "POST", booking_kind.path, body, is_selection=booking_kind.may_wait
            )

        outcome = ExchangeOutcome(now)
        for _ in range(_LEASE_TRIES):
            outcome = yield from self.attempts.anywhere(prepare, outcome.now, until, trail)
            lease = draft.lease
            if outcome.status != _NOT_FOUND or lease is None:
                return outcome
            if not code_of(outcome).startswith("lease_"):
                return outcome
            self.lose(lease)
            draft.use(None)
        return outcome

    def under_lease(
        self, selector: int, now: float, until: float
    ) -> Run[ClientLease | ExchangeOutcome | None]:
        """Return the lease for a booking at a selector, open there; or the outcome of the failure.

        Concurrent calls open the same lease, which is idempotent.
        """
        trail, tries = Trail(), 0
        while not self.leases.is_off:
            lease = self.leases.take(now)
            if lease.selector == selector:
                return lease
            is_new = lease.selector is None
            # if this selector and the last one share their books, it is known here too
            ask = self._opening(lease) if is_new else renewing(lease)
            outcome = yield from self.attempts.at(selector, ask, now, until, trail, attempts=1)
            now = outcome.now
            if outcome.status in (_OK, _CREATED):
                self._note_renewed(lease, selector, now)
            elif outcome.status == _NOT_FOUND and is_new:  # a service without leases
                self.leases.is_off, self.leases.current = True, None
            elif outcome.status == _NOT_FOUND or code_of(outcome) == _REOPENED:
                self.lose(lease)  # in the latter case we have closed it ourselves meanwhile
            else:  # opening is not repeated blindly: it may be open by now, or closed again
                tries += 1
                pause = self.attempts.pause_before(tries, outcome)
                if pause is None or now + pause >= until:
                    return outcome
                now = (yield Sleep(pause)).now
        return None

    def _opening(self, lease: ClientLease) -> SelectorRequest:
        body: dict[str, object] = {
            "lease_id": lease.lease_id,
            "owner": self.owner,
            "ttl_s": self.options.lease_ttl_s,
        }
        return SelectorRequest("POST", "/leases", body)

    def _note_renewed(self, lease: ClientLease, selector: int, now: float) -> None:
        if self.leases.knows(lease):
            lease.selector = selector
            lease.renewed_at = now
            self.on_work()

    def lose(self, lease: ClientLease) -> None:
        """Drop a lease unknown to the selector; its bookings must be made again."""
        if not self.leases.knows(lease):
            return
        self.leases.lose(lease)
        for name, booking in self.bookings.items():
            if booking.draft.lease is lease:
                self.lost[name] = booking
        self.on_work()

    def _abandon(self, draft: Draft, now: float, *, is_owed: bool) -> None:
        """Give up an id; free it if it may have been booked."""
        if is_owed:
            if draft.lease is not None:
                draft.lease.doubt(draft.reservation_id)
            self.outbox.entry(draft.reservation_id, now).is_freed = True
        draft.use(None)

    def _degrade(self, booking_kind: BookingKind, draft: Draft) -> ClientBooking | None:
        answer = booking_kind.stand_in()
        if answer is None:
            return None
        self.stats.degraded += 1
        answer.reservation_id = draft.reservation_id
        booking = ClientBooking(draft, answer, is_degraded=True)
        self.catalog.begin(booking.ranks)
        return booking

    # -- the life of a booking -----------------------------------------------------------------

    def prefill_complete(
        self, booking: ClientBooking, cached_tokens: int | None, now: float
    ) -> None:
        """Report that the prompt is computed, and how many of its tokens were cached.

        Raises:
            TypeError, ValueError: `cached_tokens` is invalid; sent, it would block all later
                reports.
        """
        if cached_tokens is not None:
            cached_tokens = _number("cached_tokens", cached_tokens)
        if cached_tokens is None and (booking.is_over or booking.is_prefilled):
            return
        booking.is_prefilled = True
        name = booking.reservation_id
        if booking.is_booked:
            is_late = booking.is_over and not self.outbox.is_waiting(name)
            entry = self.outbox.entry(name, now)
            entry.cached_tokens = cached_tokens
            if is_late:
                entry.is_freed = True  # the end has been reported: a repeat of it reports
            else:
                entry.is_prefilled = True

    def output_tokens(
        self, booking: ClientBooking, count: int, decay_fraction: float | None, now: float
    ) -> None:
        """Count output tokens; reported when they fill a block, or change the decay.

        Raises:
            TypeError, ValueError: an argument is invalid, as above.
        """
        count = _number("count", count)
        if decay_fraction is not None:
            decay_fraction = _fraction("decay_fraction", decay_fraction)
        if booking.is_over:
            return
        before = booking.output_blocks
        booking.output_tokens += count
        blocks = booking.output_blocks
        if booking.is_booked and blocks and (blocks > before or decay_fraction is not None):
            entry = self.outbox.entry(booking.reservation_id, now)
            entry.blocks = blocks
            entry.decay_fraction = decay_fraction

    def end(self, booking: ClientBooking, now: float, outcome: Outcome | None = None) -> None:
        """End a booking; idempotent. An outcome counts until the end has been sent.

        Raises:
            ValueError: no such outcome; sent, it would block all later reports.
        """
        if outcome is not None and outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, not {outcome!r}")
        if booking.is_over:
            name = booking.reservation_id
            if outcome is not None and self.outbox.is_waiting(name):
                self.outbox.entry(name, now).outcome = outcome
            return
        booking.is_over = True
        self.catalog.end(booking.ranks)
        name = booking.reservation_id
        if self.bookings.pop(name, None) is not None:
            if self.lost.pop(name, None) is not None:
                self.outbox.drop(name)
            entry = self.outbox.entry(name, now)
            entry.is_freed, entry.outcome = True, outcome
        lease = booking.draft.lease
        if booking.is_unsure and lease is not None:
            lease.doubt(name)
        booking.draft.use(None)
        self.on_work_if_idle_lease()

    def on_work_if_idle_lease(self) -> None:
        """Wake `upkeep` if a lease has become free to be closed."""
        if self.leases.old and self.leases.to_close() is not None:
            self.on_work()

    # -- the catalog ---------------------------------------------------------------------------

    def refresh_catalog(self, now: float, timeout_s: float | None = None) -> Run[None]:
        """GET /workers."""
        ask = SelectorRequest("GET", "/workers")
        self.catalog.learn((yield from self.read(ask, list[CatalogWorker], now, timeout_s)))

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClientClosed("the client is closed")

    def check(self) -> None:
        """Assert all invariants."""
        self.leases.check()
        self.outbox.check()
        for name, booking in self.bookings.items():
            assert booking.reservation_id == name
            assert booking.is_booked
            assert not booking.is_over
        assert self.lost.keys() <= self.bookings.keys()


def _number(name: str, value: SupportsIndex) -> int:
    """Return a token count as a plain int: number types of other libraries cannot be encoded."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if not 0 <= number < _U64:
        raise ValueError(f"{name} must be from 0 to below 2**64, not {number}")
    return number


def _fraction(name: str, value: SupportsFloat) -> float:
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, not {value!r}")
    fraction = float(value)
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], not {value!r}")
    return fraction


def renewing(lease: ClientLease) -> SelectorRequest:
    """Return the request that renews a lease."""
    return SelectorRequest("POST", f"/leases/{lease.lease_id}/renew")
