from collections import deque

from indexer.core.events import EventBatch
from indexer.core.stream import EventStream

ABI: int

def decode_plain(payload: bytes, form: str) -> EventBatch | None: ...

class Feeder:
    is_torn: bool
    def __init__(self, stream: EventStream) -> None: ...
    @staticmethod
    def suits(stream: EventStream) -> bool: ...
    def take(self, inbox: deque[list[bytes]], now: float) -> None: ...
