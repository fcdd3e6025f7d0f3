import asyncio

from select_service.edge.http.asgi import Door
from select_service.edge.http.fast_lane import FastLane

ABI: int

class Outbox:
    def __init__(self, most: int) -> None: ...
    def put(
        self, transport: asyncio.Transport, data: bytes, loop: asyncio.AbstractEventLoop
    ) -> None: ...
    def flush(self) -> None: ...

class Turnstile:
    def __init__(self, door: Door, preamble: object, outbox: object) -> None: ...
    def answer(self, lane: FastLane, data: bytes) -> bool | None: ...
