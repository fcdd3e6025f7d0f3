from collections import deque

from indexer._run import Run
from indexer.core.stream import EventStream

ABI: int

class Feeder(Run):
    @staticmethod
    def suits(stream: EventStream) -> bool: ...
    def take(self, inbox: deque[list[bytes]], now: float) -> None: ...
