import random

from select_service.core.columns import Floats, Groups, Slots
from select_service.core.pricing.cost import TierMatches
from select_service.core.pricing.weights import Weights

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
    def choose(
        self,
        rows: int | Slots,
        isl_tokens: int,
        block_size: int,
        blocks: int,
        weights: Weights,
        found: TierMatches | None,
        shared: Groups | None,
        trust: Floats | None,
        preference: Floats | None,
        now: float,
        rng: random.Random,
    ) -> tuple[int, float, int, int, int]: ...
    def held_at(self, slot: int) -> tuple[int, int, int]: ...

class Fill:
    def __init__(
        self, prefill: Floats, decode: Floats, block_tokens: Floats, floor: Floats
    ) -> None: ...
    def total(self, room: float) -> float: ...
