from select_service.core.admission.queue import Ticket
from select_service.core.columns import Rows
from select_service.core.decisions.fleet_snapshot import FleetSnapshot
from select_service.core.decisions.record import DecisionRecord, Look, Odds
from select_service.core.pricing.placement import Placement, Seen
from select_service.core.pricing.weights import Weights
from select_service.types import CacheHit

ABI: int

class RecordRing:
    bytes: int
    next: int
    def __init__(self, count_max: int, bytes_max: int, first: int) -> None: ...
    def __len__(self) -> int: ...
    def keep(
        self,
        ticket: Ticket,
        seen: Seen,
        rows: Rows | None,
        slot: int,
        now: float,
        odds: Odds | None,
        cache_hit: CacheHit | None,
        weights: Weights,
        fleet_snapshot: Look,
        more: int,
    ) -> DecisionRecord | None: ...
    def keep_usual(
        self,
        ticket: Ticket,
        placement: Placement,
        rows: Rows,
        now: float,
        cache_hit: CacheHit | None,
        fleet_snapshot: FleetSnapshot,
    ) -> bool: ...
    def numbered(self, number: int) -> DecisionRecord | None: ...
    def numbers_of(self, names: frozenset[str]) -> list[int]: ...
