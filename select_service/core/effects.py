"""What must be done after a verb of the core: the only way the core affects the outside world.

The core appends; the driver (`edge/driver/driver.py`) carries out, in the order of the fields
below. A verb without outside effects returns `NOTHING`, which is shared and stays empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from indexer.core.stream import EventStream
    from indexer.types import Scope, WorkerRank
    from select_service.core.admission.queue import Ticket
    from select_service.core.fleet.outliers import EjectionChange
    from select_service.core.pricing.placement import Placement
    from select_service.core.replication.messages import ReplicaMessage


class Listen(Struct, frozen=True):
    """Subscribe to one rank's KV events."""

    stream: EventStream
    endpoint: str
    replay_endpoint: str | None
    curve_key: str | None = None  # the worker's own, if it has one


class Pull(Struct, frozen=True):
    """Fetch a publisher's snapshot: from `url`, or from its port on the host of its peer."""

    peer: str  # the endpoint its message came from
    router_id: int
    http_port: int
    url: str | None


class TrustChange(Struct, frozen=True):
    """The trust in a rank's index, or the reasons for it, have changed."""

    rank: WorkerRank
    scope: Scope
    trust: float
    reasons: tuple[str, ...]  # none: it counts in full again
    missing_share: float


class RankEjection(Struct, frozen=True):
    """A rank is passed over from now on, is due for a probe, or lives again."""

    rank: WorkerRank
    scope: Scope
    change: EjectionChange


class Effects(Struct):
    """Things to do, oldest first within each list."""

    unlisten: list[EventStream] = []
    listen: list[Listen] = []
    reread: list[EventStream] = []  # have a new request that no message triggered
    answered: list[Ticket] = []  # tickets that waited and now have their answer
    published: list[ReplicaMessage] = []
    pulls: list[Pull] = []
    decided: list[tuple[Placement, Ticket]] = []
    trusted: list[TrustChange] = []  # to be logged, as is the next
    ejected: list[RankEjection] = []
    more: bool = False  # housekeeping wants another turn at once

    def __bool__(self) -> bool:
        return bool(
            self.answered
            or self.published
            or self.listen
            or self.unlisten
            or self.decided
            or self.reread
            or self.trusted
            or self.ejected
            or self.pulls
            or self.more
        )


NOTHING: Final = Effects()
