"""What an engine tells of its KV cache: blocks that can be found from now on, and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from array import array

__all__ = ["KvEvent", "Removed", "Stored"]


class Stored(NamedTuple):
    """Consecutive blocks can be found from now on, behind `parent`; None: at the root."""

    parent: int | None
    blocks: array[int]


class Removed(NamedTuple):
    """Blocks cannot be found any more."""

    blocks: array[int]


KvEvent = Stored | Removed
