"""What is wrong with a reservation or its lease."""

from __future__ import annotations

from typing import ClassVar

from select_service.errors.refusal import BoundReached, Crowded, ServiceError


class ReservationNotFound(ServiceError):
    """An id never seen."""

    status = 404
    code = "reservation_not_found"

    def __init__(self, reservation_id: str) -> None:
        super().__init__(f"reservation {reservation_id} not found")


class ReservationConflict(ServiceError):
    """The id is live with another body or in another scope."""

    status = 409
    code = "reservation_conflict"


class ReservationUnderWay(ServiceError):
    """A batch in progress has booked the id, and may yet take it back."""

    status = 503
    code = "reservation_under_way"

    def __init__(self, reservation_id: str, prefix: str = "") -> None:
        super().__init__(
            f"{prefix}Request {reservation_id} is being booked by a batch", field="reservation_id"
        )


class TooManyReservations(BoundReached):
    """More live reservations and waiting requests than `--reservations-max`."""

    status = 503
    code = "too_many_reservations"

    def __init__(self, most: int, crowded: Crowded | None = None) -> None:
        none = f"{most} reservations are live, no more may be"
        super().__init__(none if crowded is None else "no more reservations may be live", crowded)


class LeaseNotFound(ServiceError):
    """No such lease is remembered."""

    status = 404
    code = "lease_not_found"
    what: ClassVar[str] = "not found"

    def __init__(self, lease_id: str) -> None:
        super().__init__(f"lease {lease_id} {self.what}", field="lease_id")


class LeaseExpired(LeaseNotFound):
    """The lease was not renewed in time; what was booked under it is freed."""

    code = "lease_expired"
    what = "has expired, and what was booked under it is freed"


class LeaseClosed(LeaseNotFound):
    """The lease's owner has closed it."""

    code = "lease_closed"
    what = "is closed"


class LeaseReopened(ServiceError):
    """The lease's owner has just closed it: the request came late, or again."""

    status = 409
    code = "lease_reopened"

    def __init__(self, lease_id: str, wait_s: float) -> None:
        super().__init__(
            f"lease {lease_id} was closed just now; open another, or this one in {wait_s:.3g} s",
            field="lease_id",
        )


class LeaseConflict(ServiceError):
    """The id of the lease is another owner's."""

    status = 409
    code = "lease_conflict"

    def __init__(self, lease_id: str) -> None:
        super().__init__(f"lease {lease_id} is open for another owner", field="lease_id")


class TooManyLeases(BoundReached):
    """More open leases than `--leases-max`; ask again when the first ends unless it is renewed."""

    status = 503
    code = "too_many_leases"

    def __init__(self, most: int, crowded: Crowded | None = None) -> None:
        none = f"{most} leases are open, no more may be"
        super().__init__(none if crowded is None else "no more leases may be open", crowded)
