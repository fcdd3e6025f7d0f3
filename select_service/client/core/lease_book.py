"""The leases of a client's bookings: the current one, and old ones with live bookings.

A request whose reply was lost may arrive late and make a booking that nothing frees. It books under
the lease it names, and is refused once that lease is closed. So a lease under which a reply was
lost is retired soon: new bookings use another one, and when the old one's bookings are over it is
closed with whatever is left. Until then possible late bookings (`ghosts`) are freed again with
every renewal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.client.core.options import Options

_GHOSTS_MAX = 1024  # per lease


class ClientLease:
    """One lease as its owner sees it. Written by `LeaseBook` and the runs that open and renew."""

    __slots__ = ("ghosts", "is_doubtful", "lease_id", "renewed_at", "selector", "since", "users")

    def __init__(self, lease_id: str, now: float) -> None:
        self.lease_id = lease_id
        self.selector: int | None = None  # where it was last confirmed; None: not open yet
        self.since = now
        self.renewed_at = now  # or opened
        self.users = 0  # live bookings, and those in the making
        self.is_doubtful = False
        self.ghosts: dict[str, None] = {}  # ids that a late request may still book

    def doubt(self, reservation_id: str) -> None:
        """Note that a request may still be in flight that books this id in vain."""
        self.is_doubtful = True
        self.ghosts[reservation_id] = None
        if len(self.ghosts) > _GHOSTS_MAX:
            del self.ghosts[next(iter(self.ghosts))]  # the oldest is the least likely to arrive


class LeaseBook:
    """All leases of a client."""

    def __init__(self, options: Options, new_id: Callable[[], str]) -> None:
        self._options = options
        self._new_id = new_id
        self.current: ClientLease | None = None
        self.old: list[ClientLease] = []
        self.is_off = options.lease_ttl_s is None

    @property
    def renew_every_s(self) -> float:
        """A third of the time to live, so that two renewals may be lost."""
        return (self._options.lease_ttl_s or 0.0) / 3.0

    def take(self, now: float) -> ClientLease:
        """Return the lease for a new booking."""
        if self.current is None:
            self.current = ClientLease(self._new_id(), now)
        return self.current

    def rotate(self, now: float) -> None:
        """Retire the current lease if a reply was lost under it, and it is time."""
        lease = self.current
        if lease is None or not lease.is_doubtful or len(self.old) >= self._options.leases_max:
            return
        if lease.users and now < lease.since + self._options.lease_rotate_s:
            return
        self.current = None
        self.old.append(lease)

    def lose(self, lease: ClientLease) -> None:
        """Drop a lease that has ended at the service, or is unknown to the current selector."""
        if lease is self.current:
            self.current = None
        elif lease in self.old:
            self.old.remove(lease)

    def forget_ghost(self, reservation_id: str) -> None:
        """Forget a ghost, because its id is being used again."""
        for lease in (self.current, *self.old):
            if lease is not None and lease.ghosts:
                lease.ghosts.pop(reservation_id, None)

    def knows(self, lease: ClientLease) -> bool:
        """Whether a lease has been neither lost nor closed."""
        return lease is self.current or lease in self.old

    def to_renew(self, selector: int, now: float) -> ClientLease | None:
        """Return an open lease whose renewal at the selector is due."""
        return next((one for one in self._open() if self._due_at(one, selector) <= now), None)

    def _open(self) -> list[ClientLease]:
        leases = self.old if self.current is None else [self.current, *self.old]
        return [lease for lease in leases if lease.selector is not None]

    def _due_at(self, lease: ClientLease, selector: int) -> float:
        """When to renew a lease; at once at a selector that has not confirmed it."""
        return lease.renewed_at + self.renew_every_s if lease.selector == selector else 0.0

    def to_close(self) -> ClientLease | None:
        """Return an old lease without bookings."""
        return next((lease for lease in self.old if not lease.users), None)

    def due(self, selector: int) -> float:
        """When a lease needs something done; infinity if never."""
        at = min((self._due_at(one, selector) for one in self._open()), default=float("inf"))
        if any(not lease.users for lease in self.old):
            return 0.0
        lease = self.current
        if lease is not None and lease.is_doubtful and len(self.old) < self._options.leases_max:
            at = min(at, lease.since + self._options.lease_rotate_s if lease.users else 0.0)
        return at

    def check(self) -> None:
        """Assert all invariants."""
        assert self.current not in self.old
        assert len(self.old) <= self._options.leases_max
        assert all(lease.users >= 0 for lease in self.old)
