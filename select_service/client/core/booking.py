"""One reservation as its owner sees it: what the service answered, and what became of it since."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

if TYPE_CHECKING:
    from select_service.client.core.leases import Lease
    from select_service.types import Selection

__all__ = ["Booking", "Draft"]


class Draft:
    """A booking being made: the id and lease of its present attempt."""

    __slots__ = ("base_id", "lease", "number", "selector")

    def __init__(self, base_id: str) -> None:
        self.base_id = base_id
        self.number = 0
        self.selector: int | None = None  # where it was asked for under this id
        self.lease: Lease | None = None

    @property
    def reservation_id(self) -> str:
        """The caller's id; at every further selector one of its own.

        What a first selector may have booked can so be freed without harm to what a second one has,
        also when the two turn out to share their books.
        """
        return self.base_id if not self.number else f"{self.base_id}~{self.number}"

    def use(self, lease: Lease | None) -> None:
        """It is being made under this lease, and no other."""
        if lease is not self.lease:
            if self.lease is not None:
                self.lease.users -= 1
            if lease is not None:
                lease.users += 1
            self.lease = lease


class Booking:
    """A live reservation, or a degraded choice that nobody has booked."""

    __slots__ = (
        "draft",
        "is_booked",
        "is_degraded",
        "is_over",
        "is_prefilled",
        "is_unsure",
        "output_tokens",
        "selection",
    )

    def __init__(self, draft: Draft, selection: Selection, *, is_degraded: bool) -> None:
        self.draft = draft
        self.selection = selection
        self.is_degraded = is_degraded
        self.is_booked = not is_degraded
        self.is_over = False
        self.is_prefilled = False
        self.is_unsure = False  # an attempt to book it may still be under way
        self.output_tokens = 0

    @property
    def reservation_id(self) -> str:
        """The id under which it is booked now."""
        return self.draft.reservation_id

    @property
    def output_blocks(self) -> int:
        """Blocks filled since the prompt; the first of them began with the prompt's last tokens."""
        size = self.selection.block_size
        prompt = 0 if self.selection.isl_tokens is UNSET else self.selection.isl_tokens
        return (prompt + self.output_tokens) // size - prompt // size

    def facts(self) -> dict[str, object]:
        """Return the body that books the same rank again, for as much as is still to be done."""
        chosen = self.selection
        effective = 0 if self.is_prefilled else chosen.effective_prefill_tokens
        if chosen.track_prefill_tokens is False:
            effective = 0
        hashes = [] if chosen.sequence_hashes is UNSET else chosen.sequence_hashes
        isl = effective if chosen.isl_tokens is UNSET else chosen.isl_tokens
        body: dict[str, object] = {
            "reservation_id": self.reservation_id,
            "model_name": chosen.model_name,
            "tenant_id": chosen.tenant_id,
            "worker_id": chosen.worker_id,
            "dp_rank": chosen.dp_rank,
            "sequence_hashes": hashes,
            "isl_tokens": isl,
            "effective_prefill_tokens": min(effective, isl),
        }
        if chosen.selection_id is not UNSET:
            body["selection_id"] = chosen.selection_id
        if self.draft.lease is not None:
            body["lease_id"] = self.draft.lease.lease_id
        return body
