from select_service.core.columns import Floats, Slots

ABI: int

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
        seats: Slots,
        wait: Floats,
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
    def lengthen(self, slot: int, decode: int, blocks: int) -> None: ...
    def give_up(self, slot: int, left: int, begun: int, prompts: int) -> None: ...
    def free(self, slot: int, requests: int, decode: int, blocks: int) -> None: ...
