"""The KV cache events of an engine: blocks that can be found from now on, and no longer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from indexer.types import Tier

if TYPE_CHECKING:
    from array import array


class Stored(NamedTuple):
    """Consecutive blocks can be found from now on, behind `parent`; None: at the root."""

    parent: int | None
    blocks: array[int]
    tier: Tier = Tier.DEVICE


class Removed(NamedTuple):
    """Blocks can no longer be found."""

    blocks: array[int]
    tier: Tier = Tier.DEVICE


KvEvent = Stored | Removed
