from collections.abc import Collection
from typing import TypeAlias

Scanned: TypeAlias = tuple[bytes, list[str] | None, list[tuple[str, bytes]], bytes | None]

ABI: int

def msgpack_tokens(packed: bytes) -> bytes: ...

class Scanner:
    def __init__(
        self,
        names: Collection[bytes],
        hashes: Collection[bytes],
        tokens: Collection[bytes],
        shown: bytes | None = None,
        inner: tuple[bytes, bytes] | None = None,
    ) -> None: ...
    def scan(self, body: bytes) -> Scanned | None: ...
