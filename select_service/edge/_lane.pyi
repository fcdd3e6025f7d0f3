import asyncio
from collections.abc import Collection

from select_service.edge.http.asgi import Door
from select_service.edge.http.connections import ConnectionLimits
from select_service.edge.http.fast_lane import FastLane

ABI: int

class Outbox:
    def __init__(self, most: int) -> None: ...
    def put(
        self, transport: asyncio.Transport, data: bytes, loop: asyncio.AbstractEventLoop
    ) -> None: ...
    def flush(self) -> None: ...

class Turnstile:
    def __init__(
        self,
        door: Door,
        preamble: object,
        outbox: object,
        limits: ConnectionLimits,
        names: Collection[bytes],
    ) -> None: ...
    def passage(self, lane: FastLane) -> Passage: ...
    def answer(self, passage: Passage, data: bytes) -> bool | None: ...

class Passage:
    @property
    def lane(self) -> FastLane: ...
    def data_received(self, data: bytes) -> None: ...
