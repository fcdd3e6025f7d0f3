"""Owners of reservations: a lease lives as long as it is renewed."""

from msgspec import UNSET, Struct, UnsetType

from select_service.types.ranges import U64, Seconds


class LeaseRequest(Struct, kw_only=True):
    """POST /leases: open one, or renew one's own under the same id."""

    owner: str
    ttl_s: Seconds
    """Seconds without a renewal after which the lease ends, e.g. `30.0`."""
    lease_id: str | None = None
    """Id of the lease, chosen by the client so that the call is safe to repeat; null: one is made,
    e.g. `"router-1"`."""


class LeaseRenewal(Struct, kw_only=True):
    """POST /leases/{id}/renew."""

    ttl_s: Seconds | None = None
    """Another time to live from now on, in seconds; null: as before, e.g. `30.0`."""


class LeaseState(Struct, frozen=True, omit_defaults=True):
    """What must be kept of a lease to put it back."""

    lease_id: str
    owner: str
    ttl_s: float
    born: int = 0
    """The last statement to replicas before it was opened: what is under it has higher numbers."""
    adopted: bool = False
    """It was opened for what another replica had left under this id."""
    revision: U64 = 0
    """Grows with each change of `ttl_s` by a client: the highest one counts."""
    first_revision: U64 = 0
    """The one it was opened with; 0: `born`."""


class LeaseRecord(Struct, frozen=True):
    """An open lease as the lease routes answer it."""

    lease_id: str
    owner: str
    ttl_s: float
    """Seconds without a renewal after which it ends, rounded up to three digits, e.g. `30.0`."""
    expires_in_s: float
    """Seconds until it ends, unless it is renewed, e.g. `21.4`."""
    reservations: int
    router_ids: list[int] | UnsetType = UNSET
    """Replicas by whose reservations it is known; absent: it is open here, e.g. `[81093]`."""


class LeaseList(Struct, frozen=True):
    """GET /leases: oldest first, as many as fit, and how many there are."""

    leases: list[LeaseRecord]
    """Open leases, oldest first."""
    total: int
    """Number of open leases, e.g. `1`."""
