from collections.abc import Collection

ABI: int

def signed_json(packed: bytes) -> bytes: ...

class Scanner:
    def __init__(
        self,
        names: Collection[bytes],
        hashes: Collection[bytes],
        tokens: Collection[bytes],
        shown: bytes | None = None,
    ) -> None: ...
    def scan(
        self, body: bytes
    ) -> tuple[bytes, bool, list[tuple[str, bytes]], bytes | None] | None: ...
