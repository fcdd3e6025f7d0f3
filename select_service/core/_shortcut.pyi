import random
from collections.abc import Callable, Mapping

from indexer.types import Scope
from select_service.core._booking import Clerk
from select_service.core.booking.desk import Desk
from select_service.core.counters import Counters
from select_service.core.decisions.keeping import Decisions
from select_service.core.effects import Effects
from select_service.core.partition import Partition
from select_service.core.pricing.weights import Weights
from select_service.core.verbs.placing import Placing
from select_service.types import (
    Answer,
    CoreLimits,
    ReservationAnswer,
    ReservationRequest,
    RouterConfigOverride,
    SelectAndReserveRequest,
    SelectRequest,
)
from select_service.types.admission import AdmissionSettings

ABI: int

class Shortcut:
    def __init__(
        self,
        partitions: Mapping[Scope, Partition],
        limits: CoreLimits,
        settings: AdmissionSettings,
        weights: Weights,
        weights_of: Callable[[RouterConfigOverride], Weights],
        placing: Placing,
        decisions: Decisions,
        counters: Counters,
        rng: random.Random,
        draws: list[float | int] | None = None,
        clerk: Clerk | None = None,
        desk: Desk | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None: ...
    @staticmethod
    def suits(weights: Weights) -> bool: ...
    def select(self, request: SelectRequest, now: float) -> tuple[Answer, Effects] | None: ...
    def reserve(
        self, request: ReservationRequest, now: float
    ) -> tuple[ReservationAnswer, Effects] | None: ...
    def select_and_reserve(
        self, request: SelectAndReserveRequest, now: float
    ) -> tuple[Answer, Effects] | None: ...
