from collections.abc import Callable

from select_service.core.columns import Floats, Slots

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
