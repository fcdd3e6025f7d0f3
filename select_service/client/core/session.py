"""The client without its sockets: bookings, leases, what is on its way, and where to ask.

Every verb is a run (`exchange.py`) that a face drives; whatever changes the state between two steps
does so at once, so faces with threads hold one lock around each step. `upkeep.py` does what nobody
waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from select_service.client.core.attempts import Attempts, always
from select_service.client.core.booking import Booking, Draft
from select_service.client.core.exchange import Ask, Outcome, Sleep, Trail
from select_service.client.core.fallback import Catalog, scope_of
from select_service.client.core.leases import LeaseBook
from select_service.client.core.outbox import Outbox
from select_service.client.core.problems import (
    BlockSizeUnknown,
    ClientClosed,
    NotAnAnswer,
    NotCached,
    code_of,
    raise_unless_answered,
)
from select_service.client.core.selectors import Selectors
from select_service.client.core.wire import CatalogWorker, decode
from select_service.types import CacheThreshold, Selection

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from select_service.client.core.exchange import Run
    from select_service.client.core.leases import Lease
    from select_service.client.core.options import Options

    Hash = Callable[..., dict[str, object]]

__all__ = ["Session"]

T = TypeVar("T")

_OK: Final = 200
_CREATED: Final = 201
_NOT_FOUND: Final = 404
_LEASE_TRIES: Final = 3  # a lease that ends while something is booked under it


class Session:
    """Everything a client knows."""

    def __init__(  # noqa: PLR0913 - what a pure room cannot have by itself
        self,
        names: Sequence[str],
        options: Options,
        *,
        owner: str,
        rng: random.Random,
        new_id: Callable[[], str],
        hash_prompt: Hash,
        on_work: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with nothing.

        Args:
            names: of the selectors, in order, for messages.
            options: limits.
            owner: of the leases.
            rng: for backoff and degraded choices.
            new_id: returns an id nobody has used.
            hash_prompt: hashes tokens as the service does.
            on_work: called when `upkeep` has something to do earlier than it said.
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
        self.outbox = Outbox(on_work, options.batch_operations_max)
        self.catalog = Catalog(options.catalog_workers_max)
        self.bookings: dict[str, Booking] = {}  # live and booked, by id
        self.lost: dict[str, Booking] = {}  # of them, those to be booked again; told nothing yet
        self.is_closed = False
        self._hash_prompt = hash_prompt
        self.on_work = on_work

    @property
    def is_settled(self) -> bool:
        """Everything said so far has been told, and everything live is booked."""
        return not len(self.outbox) and not self.lost

    # -- any call ------------------------------------------------------------------------------

    def ask(self, ask: Ask, now: float, timeout_s: float | None = None) -> Run[Outcome]:
        """Ask whoever answers.

        Raises:
            ServiceError: it refuses.
            ClientError: nobody answers.
        """
        self._check_open()
        until = now + (self.options.timeout_ms / 1e3 if timeout_s is None else timeout_s)
        outcome = yield from self.attempts.anywhere(always(ask), now, until)
        if outcome.status not in ask.accepts:
            raise_unless_answered(outcome, self.names)
        return outcome

    def read(self, ask: Ask, kind: type[T], now: float, timeout_s: float | None) -> Run[T]:
        """Ask, and read the answer as a type."""
        outcome = yield from self.ask(ask, now, timeout_s)
        return decode(outcome, kind)

    def select(
        self, prompt: dict[str, Any], now: float, timeout_s: float | None
    ) -> Run[Selection | CacheThreshold]:
        """POST /select: who should take this prompt? Nothing is booked."""
        prompt = yield from self._hashed(prompt, now, timeout_s)
        ask = Ask("POST", "/select", prompt, is_selection=True)
        outcome = yield from self.ask(ask, now, timeout_s)
        return _chosen(outcome)

    # -- bookings ------------------------------------------------------------------------------

    def reserve(
        self, prompt: dict[str, Any], reservation_id: str, now: float, timeout_s: float | None
    ) -> Run[Booking]:
        """Choose and book. Whatever may be left behind when this does not end well is freed.

        Raises:
            ServiceError: the service refuses.
            NotCached: nobody holds enough of the prompt.
            ClientError: nobody answers, and there is no catalog to choose from.
        """
        self._check_open()
        until = now + (self.options.timeout_ms / 1e3 if timeout_s is None else timeout_s)
        draft, trail = Draft(reservation_id), Trail()
        if self.outbox.has(reservation_id):  # its last life is being ended
            draft.number = 1
        self.leases.forget_ghost(reservation_id)
        if self.selectors.is_down and self.options.degraded:
            booking = self._degrade(prompt, draft)
            if booking is not None:
                return booking
        is_booked = is_owed = False
        try:
            prompt = yield from self._hashed(prompt, now, until - now)
            outcome = yield from self._book(prompt, draft, now, until, trail)
            if self._is_nobody_there(outcome, trail):
                booking = self._degrade(prompt, Draft(reservation_id))
                if booking is not None:
                    return booking
            raise_unless_answered(outcome, self.names)
            is_owed = True
            chosen = _chosen(outcome)
            if isinstance(chosen, CacheThreshold):
                is_owed = False
                raise NotCached(chosen)
            is_booked = True
        finally:
            if trail.is_unsure and draft.lease is not None:
                draft.lease.is_doubtful = True
                self.on_work()
            if not is_booked:
                self._abandon(draft, now, is_owed=is_owed or trail.is_unsure)
        booking = Booking(draft, chosen, is_degraded=False)
        booking.is_unsure = trail.is_unsure
        self.bookings[booking.reservation_id] = booking
        if draft.lease is not None and not self.leases.knows(draft.lease):
            self.lost[booking.reservation_id] = booking  # the others have moved on meanwhile
            self.on_work()
        self.catalog.begin(chosen.worker_id, chosen.dp_rank)
        return booking

    def _is_nobody_there(self, outcome: Outcome, trail: Trail) -> bool:
        """Whether to choose here. A selector that is only slow may have a queue before it."""
        if outcome.failure is None or not self.options.degraded:
            return False
        return self.selectors.is_down or not trail.was_slow

    def _book(
        self, prompt: dict[str, Any], draft: Draft, now: float, until: float, trail: Trail
    ) -> Run[Outcome]:
        def prepare(selector: int, now: float, /) -> Run[Ask | Outcome]:
            found = yield from self.under_lease(selector, now, until)
            if isinstance(found, Outcome):
                return found
            if draft.selector not in (None, selector):
                self._abandon(draft, now, is_owed=trail.is_unsure)
                draft.number += 1
            draft.selector = selector
            draft.use(found)
            body = {**prompt, "reservation_id": draft.reservation_id}
            if found is not None:
                body["lease_id"] = found.lease_id
            return Ask("POST", "/select_and_reserve", body, is_selection=True)

        outcome = Outcome(now)
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

    def under_lease(self, selector: int, now: float, until: float) -> Run[Lease | Outcome | None]:
        """Return the lease for a booking at a selector, open there; or why there is none.

        Many may do this at once: they open the same lease, which is the same as once.
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
                self._heard(lease, selector, now)
            elif outcome.status == _NOT_FOUND and is_new:  # a service without leases
                self.leases.is_off, self.leases.current = True, None
            elif outcome.status == _NOT_FOUND:
                self.lose(lease)
            else:  # opening is not repeated blindly: it may be open by now, or closed again
                tries += 1
                pause = self.attempts.pause_before(tries, outcome)
                if pause is None or now + pause >= until:
                    return outcome
                now = (yield Sleep(pause)).now
        return None

    def _opening(self, lease: Lease) -> Ask:
        body: dict[str, object] = {
            "lease_id": lease.lease_id,
            "owner": self.owner,
            "ttl_s": self.options.lease_ttl_s,
        }
        return Ask("POST", "/leases", body)

    def _heard(self, lease: Lease, selector: int, now: float) -> None:
        if self.leases.knows(lease):
            lease.selector = selector
            lease.heard_at = now
            self.on_work()

    def lose(self, lease: Lease) -> None:
        """A lease is not known where we ask: what lived under it has to be booked again."""
        if not self.leases.knows(lease):
            return
        self.leases.lose(lease)
        for name, booking in self.bookings.items():
            if booking.draft.lease is lease:
                self.lost[name] = booking
        self.on_work()

    def _abandon(self, draft: Draft, now: float, *, is_owed: bool) -> None:
        """Nobody will use what was asked for under this id; free it if it may have been booked."""
        if is_owed:
            if draft.lease is not None:
                draft.lease.doubt(draft.reservation_id)
            self.outbox.entry(draft.reservation_id, now).is_freed = True
        draft.use(None)

    def _degrade(self, prompt: dict[str, Any], draft: Draft) -> Booking | None:
        chosen = self.catalog.choose(prompt, self.rng)
        if chosen is None:
            return None
        self.stats.degraded += 1
        chosen.reservation_id = draft.reservation_id
        self.catalog.begin(chosen.worker_id, chosen.dp_rank)
        return Booking(draft, chosen, is_degraded=True)

    # -- the life of a booking -----------------------------------------------------------------

    def prefill_complete(self, booking: Booking, cached_tokens: int | None, now: float) -> None:
        """Its prompt is computed, so much of it was cached."""
        if booking.is_over:
            return
        booking.is_prefilled = True
        if booking.is_booked:
            entry = self.outbox.entry(booking.reservation_id, now)
            entry.is_prefilled = True
            entry.cached_tokens = cached_tokens

    def output_tokens(
        self, booking: Booking, count: int, decay_fraction: float | None, now: float
    ) -> None:
        """So many more tokens have come out; told when they fill a block, or fade what is there."""
        if booking.is_over:
            return
        if count < 0:
            raise ValueError(f"a count of tokens cannot be {count}")
        before = booking.output_blocks
        booking.output_tokens += count
        blocks = booking.output_blocks
        if booking.is_booked and blocks and (blocks > before or decay_fraction is not None):
            entry = self.outbox.entry(booking.reservation_id, now)
            entry.blocks = blocks
            entry.decay_fraction = decay_fraction

    def end(self, booking: Booking, now: float) -> None:
        """It is over; repeatable."""
        if booking.is_over:
            return
        booking.is_over = True
        self.catalog.end(booking.selection.worker_id, booking.selection.dp_rank)
        name = booking.reservation_id
        if self.bookings.pop(name, None) is not None:
            if self.lost.pop(name, None) is not None:
                self.outbox.drop(name)
            self.outbox.entry(name, now).is_freed = True
        lease = booking.draft.lease
        if booking.is_unsure and lease is not None:
            lease.doubt(name)
        booking.draft.use(None)
        self.on_work_if_idle_lease()

    def on_work_if_idle_lease(self) -> None:
        """A lease may have become free to be closed."""
        if self.leases.old and self.leases.to_close() is not None:
            self.on_work()

    # -- hashing and the catalog ---------------------------------------------------------------

    def _hashed(
        self, prompt: dict[str, Any], now: float, timeout_s: float | None
    ) -> Run[dict[str, Any]]:
        """Return a prompt with hashes in the place of its tokens, if that is wanted."""
        if not self.options.hash_locally or "token_ids" not in prompt:
            return prompt
        size, is_eagle = self.options.block_size, prompt.get("is_eagle")
        if size is None or is_eagle is None:
            worker = self.catalog.any_worker(scope_of(prompt))
            if worker is None and size is None:
                yield from self.refresh_catalog(now, timeout_s)
                worker = self.catalog.any_worker(scope_of(prompt))
            if worker is not None:
                size = size or worker.block_size
                is_eagle = worker.is_eagle if is_eagle is None else is_eagle
        if size is None:
            raise BlockSizeUnknown(f"no schedulable worker of {scope_of(prompt)} is known")
        hashed = {name: one for name, one in prompt.items() if name != "token_ids"}
        return hashed | self._hash_prompt(
            prompt["token_ids"],
            size,
            lora_name=prompt.get("lora_name"),
            cache_salt=prompt.get("cache_salt") or prompt.get("cache_namespace"),
            is_eagle=bool(is_eagle),
        )

    def refresh_catalog(self, now: float, timeout_s: float | None = None) -> Run[None]:
        """GET /workers."""
        ask = Ask("GET", "/workers")
        self.catalog.learn((yield from self.read(ask, list[CatalogWorker], now, timeout_s)))

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClientClosed("the client is closed")

    def check(self) -> None:
        """State every promise."""
        self.leases.check()
        self.outbox.check()
        for name, booking in self.bookings.items():
            assert booking.reservation_id == name
            assert booking.is_booked
            assert not booking.is_over
        assert self.lost.keys() <= self.bookings.keys()


def renewing(lease: Lease) -> Ask:
    """Return the request that keeps a lease."""
    return Ask("POST", f"/leases/{lease.lease_id}/renew")


def _chosen(outcome: Outcome) -> Selection | CacheThreshold:
    try:
        return decode(outcome, Selection)
    except NotAnAnswer:
        if b"cache_threshold" not in outcome.body:
            raise
        return decode(outcome, CacheThreshold)
