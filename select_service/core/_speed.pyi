from collections.abc import Callable, Iterator

from select_service.core.admission.queue import Ticket
from select_service.core.columns import Floats, Rows, Slots
from select_service.core.decisions.lookout import Lookout
from select_service.core.decisions.record import Look, Odds, Record, Seen
from select_service.core.pricing.placement import Placement
from select_service.core.pricing.scoring import Weights
from select_service.types import CacheHit

ABI: int

class Pricer:
    def __init__(
        self,
        prefill: Floats,
        decode: Floats,
        churn: Floats,
        context: Floats,
        heard: Floats,
        ahead: Floats,
    ) -> None: ...
    def cheapest(
        self,
        rows: int | Slots,
        isl_tokens: float,
        block_size: float,
        blocks: float,
        scale: float,
        credit: float,
        track: bool,
        matched: list[tuple[int, Slots]] | None,
        shared: list[tuple[int, Slots]] | None,
        draw: Callable[[], float],
        trust: Floats | None = None,
        ours: tuple[float, float, float, bool, float, float] | None = None,
        now: float = 0.0,
    ) -> tuple[int, float, int]: ...
    def matched_at(self, row: int) -> int: ...
    def packed(self, prefilling: float, turnover: float, pace: float | None = None) -> bytes: ...

class Fill:
    def __init__(
        self, prefill: Floats, decode: Floats, block_tokens: Floats, floor: Floats
    ) -> None: ...
    def total(self, room: float) -> float: ...

class LoadRows:
    def __init__(
        self,
        prefill: Floats,
        decode: Floats,
        churn: Floats,
        context: Floats,
        requests: Slots,
        computing: Slots,
        heard: Floats,
        ahead: Floats,
        step: Floats,
    ) -> None: ...
    def book(
        self,
        slot: int,
        left: int,
        tokens: int,
        requests: int,
        decode: int,
        blocks: int,
        now: float,
    ) -> None: ...
    def complete(self, slot: int, left: int, head: int, now: float) -> None: ...
    def free(self, slot: int, requests: int, decode: int, blocks: int) -> None: ...

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
        lookout: Look,
        more: int,
    ) -> Record | None: ...
    def keep_usual(
        self,
        ticket: Ticket,
        placement: Placement,
        rows: Rows,
        now: float,
        cache_hit: CacheHit | None,
        lookout: Lookout,
    ) -> bool: ...
    def numbered(self, number: int) -> Record | None: ...
    def numbers_of(self, names: frozenset[str]) -> list[int]: ...

class ValueSet:
    def __len__(self) -> int: ...
    def __contains__(self, value: int) -> bool: ...
    def __iter__(self) -> Iterator[int]: ...
    def enter(self, packed: bytes) -> int: ...
    def leave(self, packed: bytes) -> None: ...
    def discard(self, value: int) -> None: ...
