"""Maps the ids that bound tokens use to the ids under which the core keeps them.

Clients choose ids of reservations and leases, which are unique in the process. So that nobody can
discover another tenant's ids or take them first, ids that come with a bound token are kept with a
prefix for the tenant, and only that tenant can reach them. Unbound tokens see the kept ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from msgspec import UNSET

from select_service.core.admission.queue import Ticket
from select_service.core.tenancy.shares import prefix_of
from select_service.errors import NameRefused, ServiceError
from select_service.types import BatchAnswer, PairSelection

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.service import SelectionCore
    from select_service.types import LeaseRecord, ReservationRequest, SelectAndReserveRequest
    from select_service.types.batches import SelectBatchResult

__all__ = ["TenantIds", "prefix_of"]

_NOBODYS: Final = "\0"
"""Suffix that no reservation id has: the core then reports it as missing, without the real reason.
"""

_IDS: Final = ("reservation_id", "selection_id", "lease_id")

A = TypeVar("A")


class TenantIds:
    """The ids of a token bound to tenants.

    Attributes:
        prefixes: of each tenant's kept ids; leases go under the first.
    """

    def __init__(
        self, core: SelectionCore, tenants: tuple[str, ...], note_foreign: Callable[[], None]
    ) -> None:
        """Map ids for a token.

        Args:
            core: keeps them.
            tenants: to which the token is bound.
            note_foreign: called when something of another tenant is named.
        """
        self._core = core
        self._tenants = frozenset(tenants)
        self._note_foreign = note_foreign
        self.prefixes = tuple(prefix_of(tenant) for tenant in tenants)

    def rename(self, request: SelectAndReserveRequest | ReservationRequest) -> None:
        """Replace the client's ids in a request by those to keep."""
        prefix = prefix_of(request.scope.tenant_id)
        name = request.reservation_id
        if name is None:
            name = self._core.selection.new_id()
        request.reservation_id = prefix + name
        if request.selection_id is not None:
            request.selection_id = prefix + request.selection_id
        if request.lease_id is not None:
            request.lease_id = self.lease(request.lease_id)

    def reservation(self, name: str) -> str:
        """Return the id under which one of the client's reservations is kept."""
        lifecycle = self._core.lifecycle
        kept = [prefix + name for prefix in self.prefixes]
        # Last, the plain id: an unbound client may have booked for one of our tenants.
        for one in (*kept, name):
            tenant = lifecycle.tenant_of(one)
            if tenant is not None:
                if tenant in self._tenants:
                    return one
                self._note_foreign()
                if one is not name:  # unbound clients may choose an id with our prefix
                    return one + _NOBODYS
        bookings, claims = lifecycle.bookings, lifecycle.announcer.claims
        for one in kept[1:]:
            if bookings.was_freed(one) or claims.alive(one):
                return one
        return kept[0]

    def lease(self, lease_id: str) -> str:
        """Return the id under which one of the client's leases is kept."""
        leases = self._core.lifecycle.leases
        copies = self._core.lifecycle.announcer.claims.copies
        kept = [prefix + lease_id for prefix in self.prefixes]
        for one in kept[1:]:
            if leases.find(one) or leases.ending(one) or copies.find(one):
                return one
        return kept[0]

    def named_by_client(self, answer: A) -> A:
        """Return a copy of an answer with the client's ids; the original is kept elsewhere."""
        if isinstance(answer, Ticket):  # identified by identity; `wait` renames its answer
            return answer
        if isinstance(answer, PairSelection):
            legs = {
                name: msgspec.structs.replace(leg, reservation_id=self.short(leg.reservation_id))
                for name, leg in (("prefill", answer.prefill), ("decode", answer.decode))
                if leg is not None
            }
            answer = msgspec.structs.replace(answer, **legs)
        names = {}
        for field in ("reservation_id", "selection_id"):
            name = getattr(answer, field, UNSET)
            if isinstance(name, str):
                names[field] = self.short(name)
        if not names or not isinstance(answer, msgspec.Struct):
            return answer
        return msgspec.structs.replace(answer, **names)

    def lease_named_by_client(self, lease: LeaseRecord) -> LeaseRecord:
        """Return a lease with the client's id, and without facts about the process."""
        return msgspec.structs.replace(lease, lease_id=self.short(lease.lease_id), router_ids=UNSET)

    def result_named_by_client(self, one: SelectBatchResult) -> SelectBatchResult:
        """Return one result of a batch with the client's ids."""
        for name in ("selection", "cache_threshold"):
            answer = getattr(one, name)
            if answer is not UNSET:
                return msgspec.structs.replace(one, **{name: self.named_by_client(answer)})
        if one.error is UNSET:
            return one
        return msgspec.structs.replace(one, error=self._without_prefix(one.error))

    def batch_named_by_client(self, answer: BatchAnswer) -> BatchAnswer:
        """Return the answer to a batch with the client's ids in error texts."""
        return BatchAnswer(
            [
                one
                if one.error is UNSET
                else msgspec.structs.replace(one, error=self._without_prefix(one.error))
                for one in answer.results
            ]
        )

    def in_words_of_client(self, error: ServiceError) -> ServiceError:
        """Return a refusal with the client's ids in its text."""
        if isinstance(error, NameRefused) and error.field in _IDS:
            most = max(error.most - max(map(len, self.prefixes)), 0)
            return NameRefused(error.field, most, error.limit)
        error.args = (self._without_prefix(str(error)),)
        return error

    def short(self, name: str) -> str:
        """Strip the tenant's prefix from a kept id."""
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return name[len(prefix) :]
        return name

    def _without_prefix(self, text: str) -> str:
        for prefix in self.prefixes:
            text = text.replace(f" {prefix}", " ")
        return text.replace(_NOBODYS, "")
