"""The names under which the things of tenants are kept, and those their clients know them by.

Ids of reservations and leases are chosen by clients and unique in the process. So that nobody can
learn of another tenant's, or take them first, those that come with a bound token are kept under a
name that begins with its tenant, and only its tenant meets them there. Tokens that are not bound
see these names as they are kept.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import UNSET

from select_service.core.admission.queue import Ticket
from select_service.errors import NameRefused, ServiceError
from select_service.types import BatchAnswer, PairSelection

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.service import SelectionCore
    from select_service.types import LeaseRecord, ReservationRequest, SelectAndReserveRequest
    from select_service.types.waves import WaveResult

__all__ = ["TenantNames", "prefix_of"]

_NOBODYS: Final = "\0"
"""Ends the name of no reservation: the driver says that there is none, and not why."""

_PREFIX_MAX: Final = 32
"""Characters of a tenant's name before its ids; of a longer one, of its hash: 128 bits."""

_IDS: Final = ("reservation_id", "selection_id", "lease_id")

A = TypeVar("A")


class TenantNames:
    """What a token that is bound to tenants calls its things.

    Attributes:
        prefixes: what the names of each tenant's things begin with; the first is home to leases.
    """

    def __init__(
        self, core: SelectionCore, tenants: tuple[str, ...], note_foreign: Callable[[], None]
    ) -> None:
        """Name things for a token.

        Args:
            core: keeps them.
            tenants: the token is bound to.
            note_foreign: called when another tenant's is named.
        """
        self._core = core
        self._tenants = frozenset(tenants)
        self._note_foreign = note_foreign
        self.prefixes = tuple(prefix_of(tenant) for tenant in tenants)

    def rename(self, request: SelectAndReserveRequest | ReservationRequest) -> None:
        """Put the names of things in place of the client's."""
        prefix = prefix_of(request.scope.tenant_id)
        name = request.reservation_id
        if name is None:
            name = self._core.selecting.new_id()
        request.reservation_id = prefix + name
        if request.selection_id is not None:
            request.selection_id = prefix + request.selection_id
        if request.lease_id is not None:
            request.lease_id = self.lease(request.lease_id)

    def reservation(self, name: str) -> str:
        """Return the name under which a reservation of one's own is kept."""
        bookings = self._core.desk.bookings
        kept = [prefix + name for prefix in self.prefixes]
        # the last is that of a client that is not bound, which may be for a tenant of ours
        for one in (*kept, name):
            booking = bookings.find(one) or next(iter(bookings.legs(one)), None)
            if booking is not None:
                if booking.partition.scope.tenant_id in self._tenants:
                    return one
                self._note_foreign()
                if one is not name:  # whoever is not bound may choose a name like ours
                    return one + _NOBODYS
        claims = self._core.desk.announcer.claims
        for one in kept[1:]:
            if bookings.was_freed(one) or claims.alive(one):
                return one
        return kept[0]

    def lease(self, lease_id: str) -> str:
        """Return the name under which a lease of one's own is kept."""
        leases = self._core.desk.leases
        copies = self._core.desk.announcer.claims.copies
        kept = [prefix + lease_id for prefix in self.prefixes]
        for one in kept[1:]:
            if leases.find(one) or leases.ending(one) or copies.find(one):
                return one
        return kept[0]

    def named_by_client(self, answer: A) -> A:
        """Return an answer with the ids its client has chosen; the one that is kept stays."""
        if isinstance(answer, Ticket):  # it is known by itself, and its answer is renamed by `wait`
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
        """Return a lease with its client's name, and without what it says of the process."""
        return msgspec.structs.replace(lease, lease_id=self.short(lease.lease_id), router_ids=UNSET)

    def result_named_by_client(self, one: WaveResult) -> WaveResult:
        """Return one answer of a wave likewise."""
        for name in ("selection", "cache_threshold"):
            said = getattr(one, name)
            if said is not UNSET:
                return msgspec.structs.replace(one, **{name: self.named_by_client(said)})
        if one.error is UNSET:
            return one
        return msgspec.structs.replace(one, error=self._without_prefix(one.error))

    def batch_named_by_client(self, answer: BatchAnswer) -> BatchAnswer:
        """Return the answer to a batch with refusals in the words of its client."""
        return BatchAnswer(
            [
                one
                if one.error is UNSET
                else msgspec.structs.replace(one, error=self._without_prefix(one.error))
                for one in answer.results
            ]
        )

    def in_words_of_client(self, error: ServiceError) -> ServiceError:
        """Return a refusal that speaks of names as the client knows them."""
        if isinstance(error, NameRefused) and error.field in _IDS:
            most = max(error.most - max(map(len, self.prefixes)), 0)
            return NameRefused(error.field, most, error.limit)
        error.args = (self._without_prefix(str(error)),)
        return error

    def short(self, name: str) -> str:
        """Return a name as its client knows it."""
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return name[len(prefix) :]
        return name

    def _without_prefix(self, text: str) -> str:
        for prefix in self.prefixes:
            text = text.replace(f" {prefix}", " ")
        return text.replace(_NOBODYS, "")


def prefix_of(tenant: str) -> str:
    """Return what names of a tenant's things begin with; no two tenants' can be mistaken.

    Beside a long one (a letter may take twelve characters) no id of a client's would have room: it
    is told by its hash, behind what quoting never writes.
    """
    quoted = quote(tenant, safe="")
    if len(quoted) > _PREFIX_MAX:
        quoted = "%%" + sha256(tenant.encode()).hexdigest()[:_PREFIX_MAX]
    return quoted + ":"
