from collections.abc import Collection

ABI: int

class Scanner:
    def __init__(
        self, names: Collection[bytes], hashes: Collection[bytes], tokens: Collection[bytes]
    ) -> None: ...
    def scan(self, body: bytes) -> tuple[bytes, bool, list[tuple[str, bytes]]] | None: ...
