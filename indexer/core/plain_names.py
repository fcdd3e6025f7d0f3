"""Engine hashes to nodes, as a dict: the plain twin of `indexer/_names.pyx`."""

from __future__ import annotations

from sys import getsizeof
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from indexer.core.node import Node

_NAME_BYTES: Final = 48  # an engine hash as a Python int


class NameMap(dict[int, "Node"]):
    """Names to nodes; a name is an unsigned 64-bit number."""

    __slots__ = ()

    def knows_none(self, names: Iterable[int]) -> bool:
        """Say whether none of these names is filed."""
        return self.keys().isdisjoint(names)

    def file(self, names: Iterable[int], node: Node) -> None:
        """File names for a node, whatever they were filed for."""
        self.update(dict.fromkeys(names, node))

    def pop_some(self, count: int) -> None:
        """Forget so many names, any; what is left is not to be looked up any more."""
        for _ in range(min(count, len(self))):
            self.popitem()

    @property
    def nbytes(self) -> int:
        """Bytes of the table and its names."""
        return getsizeof(self) + len(self) * _NAME_BYTES
