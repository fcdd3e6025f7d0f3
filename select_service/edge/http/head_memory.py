"""What the lines of heads have been found to mean, by their bytes, so that they are parsed once.

Learnt by the fast lane, which reads a head here before the parser does (`fast_lane.py`), and by its
kernel. What those lines are is said in `steady.py`; what tokens allow is the authority's, who has
all of it forgotten when that changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from typing_extensions import override

if TYPE_CHECKING:
    from select_service.edge.http.calls import Head

__all__ = ["HEADS_MAX", "HEAD_BYTES_MAX", "LINES_MAX", "PEERS_MAX", "Heads", "Peers"]

HEADS_MAX: Final = 1024
"""Heads remembered, of all connections together; then they are learnt anew."""

PEERS_MAX: Final = 64
"""Clients known by their certificates that have a memory of their own; of more none is kept."""

LINES_MAX: Final = 256
"""Heads remembered as they were read, whole."""

HEAD_BYTES_MAX: Final = 1024
"""The longest that is remembered, of the lines that are."""


class Heads:
    """Lines of heads the parser has read before, by their bytes: some two megabytes at most.

    Learnt only where every line is one header to the parser: there is no other way to read them.
    """

    __slots__ = ("__weakref__", "known", "read")

    def __init__(self) -> None:
        self.known: dict[bytes, Head] = {}  # by the lines that are kept
        self.read: dict[bytes, tuple[Head, int, int]] = {}
        """What heads mean that came just so, the length of their body, and how many lines it took
        to say: where nothing differs but the path, they need not be read again."""

    def forget(self) -> None:
        """Know nothing any more: what tokens allow has changed."""
        self.known.clear()
        self.read.clear()

    def learn(self, lines: bytes, head: Head) -> None:
        """Remember what the parser has found in these lines, of a request that is plain."""
        if len(lines) > HEAD_BYTES_MAX:
            return
        if len(self.known) >= HEADS_MAX:
            self.forget()
        self.known[lines] = head

    def note(self, lines: bytes, head: Head, length: int, breaks: int) -> None:
        """Remember what all lines of a head, of HTTP/1.1, are found to mean."""
        if len(lines) > HEAD_BYTES_MAX:
            return
        if len(self.read) >= LINES_MAX:
            self.read.clear()
        self.read[lines] = head, length, breaks


class _Oblivion(Heads):
    """Remembers nothing."""

    __slots__ = ()

    @override
    def learn(self, lines: bytes, head: Head) -> None:
        """Let it pass."""

    @override
    def note(self, lines: bytes, head: Head, length: int, breaks: int) -> None:
        """Let it pass."""


class Peers:
    """What is remembered of header lines, apart for all who are known by a certificate."""

    def __init__(self) -> None:
        # as long as a connection has them: what a connection remembers can always be forgotten
        self._heads: WeakValueDictionary[tuple[str, ...], Heads] = WeakValueDictionary()

    def heads_of(self, names: tuple[str, ...]) -> Heads:
        """Return what is remembered of one client's."""
        heads = self._heads.get(names)
        if heads is None:
            if len(self._heads) >= PEERS_MAX:
                return _Oblivion()
            heads = self._heads[names] = Heads()
        return heads

    def forget(self) -> None:
        """Know nothing any more."""
        for heads in list(self._heads.values()):
            heads.forget()
