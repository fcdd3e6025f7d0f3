from collections.abc import Callable, Iterator

from select_service.core.columns import Floats, Slots

ABI: int

class Pricer:
    def __init__(self, prefill: Floats, decode: Floats) -> None: ...
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
    ) -> tuple[int, float, int]: ...
    def matched_at(self, row: int) -> int: ...

class Fill:
    def __init__(
        self, prefill: Floats, decode: Floats, block_tokens: Floats, floor: Floats
    ) -> None: ...
    def total(self, room: float) -> float: ...

class ValueSet:
    def __len__(self) -> int: ...
    def __contains__(self, value: int) -> bool: ...
    def __iter__(self) -> Iterator[int]: ...
    def enter(self, packed: bytes) -> int: ...
    def leave(self, packed: bytes) -> None: ...
    def discard(self, value: int) -> None: ...
