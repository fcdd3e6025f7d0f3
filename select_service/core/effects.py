"""What must be done after a verb of the core: the only way the core reaches the world.

The core appends, the driver (`edge/driver.py`) carries out, in the order of the fields below.
A verb that changes nothing outside returns `NOTHING`, which is shared and stays empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from indexer.core.stream import EventStream
    from select_service.core.partition import Placement
    from select_service.core.queue import Ticket
    from select_service.core.replica_messages import ReplicaMessage


@dataclass(slots=True, frozen=True)
class Listen:
    """Subscribe to one rank's KV events."""

    stream: EventStream
    endpoint: str
    replay_endpoint: str | None


@dataclass(slots=True, frozen=True)
class Pull:
    """Fetch the snapshot of a publisher: from `url`, or from its port on the host of its peer."""

    peer: str  # the endpoint its message came from
    router_id: int
    http_port: int
    url: str | None


@dataclass(slots=True)
class Effects:
    """Things to do, oldest first within each list."""

    unlisten: list[EventStream] = field(default_factory=list)
    listen: list[Listen] = field(default_factory=list)
    answered: list[Ticket] = field(default_factory=list)  # waited, and have their answer now
    published: list[ReplicaMessage] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    decided: list[Placement] = field(default_factory=list)
    more: bool = False  # housekeeping should have its turn at once

    def __bool__(self) -> bool:
        return bool(
            self.answered
            or self.published
            or self.listen
            or self.unlisten
            or self.decided
            or self.pulls
            or self.more
        )


NOTHING: Final = Effects()
