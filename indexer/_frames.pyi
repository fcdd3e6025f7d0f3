ABI: int

class LongFrame:
    size: int
    copied: int
    def copy(self, most: int) -> bytes | None: ...

def find(pyzmq: str) -> bool: ...
def receive(
    socket: int, messages_max: int, bytes_max: int, longest: int, apart: bytes
) -> list[list[bytes]]: ...
