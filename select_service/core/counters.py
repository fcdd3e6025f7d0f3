"""What happened since start, in plain integers; `edge/metrics.py` reads them at scrape time."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Monotonic counts of the core."""

    selections: int = 0
    selections_waited: int = 0
    selections_withdrawn: int = 0  # their client went away while they waited
    selections_failed: dict[str, int] = field(default_factory=dict)  # by error code
    reservations_booked: int = 0
    reservations_repeated: int = 0
    reservations_conflicting: int = 0
    reservations_freed: int = 0
    reservations_expired: int = 0
    reservations_lease_ended: int = 0  # with the lease they lived under
    reservations_dropped: int = 0  # their rank or worker went
