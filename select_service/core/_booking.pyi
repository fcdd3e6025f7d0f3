from select_service.core.booking.desk import Desk
from select_service.core.counters import Counters
from select_service.core.effects import Effects
from select_service.core.verbs.waiting_room import WaitingRoom
from select_service.types import CoreLimits, SelectAndReserveRequest

ABI: int

class Clerk:
    def __init__(
        self, desk: Desk, room: WaitingRoom, limits: CoreLimits, counters: Counters
    ) -> None: ...
    def prefill_complete(self, name: str, now: float) -> Effects | None: ...
    def free(self, name: str, now: float) -> Effects | None: ...
    def form_of(self, request: SelectAndReserveRequest) -> bytes | None: ...
