from indexer.core.stream import EventStream

ABI: int

class Run:
    is_torn: bool
    def __init__(self, stream: EventStream) -> None: ...
