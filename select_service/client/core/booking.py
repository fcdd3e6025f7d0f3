"""One reservation as its owner sees it: the service's answer, and its state since then.

`session.py` and `upkeep.py` change it; `reservation.py` shows it to the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from select_service.types import Selection

if TYPE_CHECKING:
    from select_service.client.core.lease_book import ClientLease
    from select_service.types import PairSelection


class Draft:
    """A booking in the making: the id and lease of its current attempt."""

    __slots__ = ("base_id", "lease", "number", "selector")

    def __init__(self, base_id: str) -> None:
        self.base_id = base_id
        self.number = 0
        self.selector: int | None = None  # the selector asked under this id
        self.lease: ClientLease | None = None

    @property
    def reservation_id(self) -> str:
        """The caller's id, with a suffix of its own for every further selector.

        So a booking that the first selector may have made can be freed without harming the second
        one's, even if the two turn out to share their books.
        """
        return self.base_id if not self.number else f"{self.base_id}~{self.number}"

    def use(self, lease: ClientLease | None) -> None:
        """Make this the lease of the booking, and release the previous one."""
        if lease is not self.lease:
            if self.lease is not None:
                self.lease.users -= 1
            if lease is not None:
                lease.users += 1
            self.lease = lease


class ClientBooking:
    """A live reservation, or a degraded choice that is not booked."""

    __slots__ = (
        "answer",
        "draft",
        "is_booked",
        "is_degraded",
        "is_over",
        "is_prefilled",
        "is_unsure",
        "output_tokens",
        "terms",
    )

    def __init__(
        self, draft: Draft, answer: Selection | PairSelection, *, is_degraded: bool
    ) -> None:
        self.draft = draft
        self.answer = answer
        self.is_degraded = is_degraded
        self.is_booked = not is_degraded
        self.is_over = False
        self.is_prefilled = False
        self.is_unsure = False  # an attempt to book it may still be in flight
        self.output_tokens = 0
        self.terms: dict[str, object] | None = None  # the request, if booking again needs it

    @property
    def reservation_id(self) -> str:
        """The id under which it is currently booked."""
        return self.draft.reservation_id

    @property
    def selection(self) -> Selection:
        """The answer; not for pairs."""
        assert isinstance(self.answer, Selection)
        return self.answer

    @property
    def ranks(self) -> tuple[tuple[int, int], ...]:
        """Its (worker, rank); two of them for a pair."""
        answer = self.answer
        if isinstance(answer, Selection):
            return ((answer.worker_id, answer.dp_rank),)
        legs = (answer.prefill, answer.decode)
        return tuple((one.worker_id, one.dp_rank) for one in legs if one is not None)

    @property
    def legs(self) -> int:
        """Number of reservations the service counts: the prefill leg ends with the prompt."""
        return 1 if self.is_prefilled else len(self.ranks)

    @property
    def output_blocks(self) -> int:
        """Blocks filled since the prompt; the first one began with the prompt's last tokens."""
        size = self.answer.block_size
        prompt = 0 if self.answer.isl_tokens is UNSET else self.answer.isl_tokens
        return (prompt + self.output_tokens) // size - prompt // size

    def facts(self) -> dict[str, object] | None:
        """Return the request body that books the same rank again, for the remaining work only.

        None for a pair: its answer does not contain its hashes, and one leg alone is not a pair.
        """
        if not isinstance(self.answer, Selection):
            return None
        chosen = self.answer
        effective = 0 if self.is_prefilled else chosen.effective_prefill_tokens
        if chosen.track_prefill_tokens is False:
            effective = 0
        isl = effective if chosen.isl_tokens is UNSET else chosen.isl_tokens
        body: dict[str, object] = {
            "model_name": chosen.model_name,
            "tenant_id": chosen.tenant_id,
            "worker_id": chosen.worker_id,
            "dp_rank": chosen.dp_rank,
        }
        if self.terms is not None:
            body |= self.terms
        else:
            body["sequence_hashes"] = (
                [] if chosen.sequence_hashes is UNSET else chosen.sequence_hashes
            )
            body["isl_tokens"] = isl
        if chosen.selection_id is not UNSET:
            body["selection_id"] = chosen.selection_id
        body["reservation_id"] = self.reservation_id
        body["effective_prefill_tokens"] = min(effective, isl)
        if self.draft.lease is not None:
            body["lease_id"] = self.draft.lease.lease_id
        return body
