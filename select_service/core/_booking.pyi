from select_service.core.booking.desk import Desk
from select_service.core.counters import Counters
from select_service.core.effects import Effects
from select_service.core.verbs.waiting_room import WaitingRoom
from select_service.types import CoreLimits

ABI: int

class Clerk:
    def __init__(
        self, desk: Desk, room: WaitingRoom, limits: CoreLimits, counters: Counters
    ) -> None: ...
    def prefill_complete(self, name: str, now: float) -> Effects | None: ...
    def output_block(self, name: str, now: float) -> bool: ...
    def free(self, name: str, now: float) -> Effects | None: ...
