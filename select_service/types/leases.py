"""Owners of reservations: a lease lives as long as it is renewed."""

from msgspec import UNSET, Struct, UnsetType

from select_service.types.ranges import Seconds


class LeaseRequest(Struct, kw_only=True):
    """POST /leases: open one, or renew one's own under the same id."""

    owner: str
    ttl_s: Seconds
    lease_id: str | None = None  # chosen by the client: safe to repeat


class LeaseRenewal(Struct, kw_only=True):
    """POST /leases/{id}/renew."""

    ttl_s: Seconds | None = None  # from now on


class LeaseState(Struct, frozen=True, omit_defaults=True):
    """What must be kept of a lease to put it back."""

    lease_id: str
    owner: str
    ttl_s: float
    born: int = 0
    """The last statement to replicas before it was opened: what is under it has higher numbers."""
    adopted: bool = False
    """It was opened for what another replica had left under this id."""


class LeaseRecord(Struct, frozen=True):
    """An open lease as the lease routes answer it."""

    lease_id: str
    owner: str
    ttl_s: float  # as asked for, rounded up to three significant digits
    expires_in_s: float
    reservations: int
    router_ids: list[int] | UnsetType = UNSET
    """Replicas it is known through, by whose reservations; absent: it is open here."""


class LeaseList(Struct, frozen=True):
    """GET /leases: oldest first, as many as fit, and how many there are."""

    leases: list[LeaseRecord]
    total: int
