"""Remembers the meaning of header lines by their bytes, so that they are parsed only once.

`connection.py` looks a head up here before the parser sees it, and stores what the parser found.
`header_cache.py` defines which lines count; the authority clears the memory when the permissions of
tokens change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from typing_extensions import override

if TYPE_CHECKING:
    from select_service.edge.http.calls import Head

HEADS_MAX: Final = 1024
"""Heads remembered across all connections; when full, all are dropped."""

PEERS_MAX: Final = 64
"""Clients with a certificate that have a memory of their own; more are not remembered."""

LINES_MAX: Final = 256
"""Whole heads remembered as received."""

HEAD_BYTES_MAX: Final = 1024
"""The longest head remembered, counting only the lines that are kept."""


class Heads:
    """Heads parsed before, by the bytes of their lines: some two megabytes at most.

    Stored only if the parser read every line as one header, so that there is no other reading.
    """

    __slots__ = ("__weakref__", "known", "read")

    def __init__(self) -> None:
        self.known: dict[bytes, Head] = {}  # by the kept lines
        self.read: dict[bytes, tuple[Head, int]] = {}
        """By all lines of a head, no more than allowed: its meaning, and the length of its body. A
        request that differs only in the path need not be read again."""

    def forget(self) -> None:
        """Forget everything: the permissions of tokens have changed."""
        self.known.clear()
        self.read.clear()

    def learn(self, lines: bytes, head: Head) -> None:
        """Store what the parser found in the kept lines of a plain request."""
        if len(lines) > HEAD_BYTES_MAX:
            return
        if len(self.known) >= HEADS_MAX:
            self.forget()
        self.known[lines] = head

    def note(self, lines: bytes, head: Head, length: int) -> None:
        """Store the meaning of all lines of an HTTP/1.1 head."""
        if len(lines) > HEAD_BYTES_MAX:
            return
        if len(self.read) >= LINES_MAX:
            self.read.clear()
        self.read[lines] = head, length


class _Oblivion(Heads):
    """Remembers nothing."""

    __slots__ = ()

    @override
    def learn(self, lines: bytes, head: Head) -> None:
        """Do nothing."""

    @override
    def note(self, lines: bytes, head: Head, length: int) -> None:
        """Do nothing."""


class Peers:
    """The memories of clients with certificates, separate for each."""

    def __init__(self) -> None:
        # Weak: lives as long as a connection uses it, so that `forget` reaches all in use.
        self._heads: WeakValueDictionary[tuple[str, ...], Heads] = WeakValueDictionary()

    def heads_of(self, names: tuple[str, ...]) -> Heads:
        """Return the memory of one client."""
        heads = self._heads.get(names)
        if heads is None:
            if len(self._heads) >= PEERS_MAX:
                return _Oblivion()
            heads = self._heads[names] = Heads()
        return heads

    def forget(self) -> None:
        """Forget everything."""
        for heads in list(self._heads.values()):
            heads.forget()
