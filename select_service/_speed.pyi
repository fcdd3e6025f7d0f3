from collections.abc import Callable, Collection
from typing import Any

ABI: int

def signed_json(packed: bytes) -> bytes: ...
def msgpack_tokens(packed: bytes) -> bytes: ...

class Scanner:
    def __init__(
        self,
        names: Collection[bytes],
        hashes: Collection[bytes],
        tokens: Collection[bytes],
        shown: bytes | None = None,
        made: object = None,
        texts: Collection[bytes] = (),
        wholes: Collection[bytes] = (),
        counts: Collection[bytes] = (),
        note: Callable[[bytes, bytes], None] | None = None,
        required: Collection[bytes] = (),
        inner: tuple[bytes, bytes] | None = None,
    ) -> None: ...
    def scan(self, body: bytes, small_bytes: int = 0) -> Any: ...
