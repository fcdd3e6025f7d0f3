from collections import deque

from indexer.core.stream import EventStream

ABI: int

class Feeder:
    is_torn: bool
    def __init__(self, stream: EventStream) -> None: ...
    @staticmethod
    def suits(stream: EventStream) -> bool: ...
    def take(self, inbox: deque[list[bytes]], now: float) -> None: ...
