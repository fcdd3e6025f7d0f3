"""Local hashes of a store event's blocks: of its tokens, media and opaque keys.

`writer.py` asks for them slice by slice; `hashing.py` has the hash itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from indexer.core.hashing import block_hashes, unmatchable
from indexer.core.packing import is_packed

if TYPE_CHECKING:
    from indexer.core.events import BlockStored
    from indexer.types import Namespace, PackedHashes

__all__ = ["has_extra_keys", "local_hashes"]


class _Index(Protocol):
    """What is used of a `KvIndex`."""

    block_size: int
    is_eagle: bool


def has_extra_keys(event: BlockStored) -> bool:
    """Return whether its blocks depend on more than tokens: each takes as long as eight others."""
    return event.mm_hashes is not None or event.opaque is not None


def local_hashes(
    index: _Index, event: BlockStored, namespace: Namespace, start: int, end: int
) -> PackedHashes:
    """Hash the blocks from `start` up to `end` of an event.

    Raises:
        ValueError: a token beyond 32 bits.
    """
    tokens, size = event.token_ids, index.block_size
    mm_hashes, opaque = event.mm_hashes, event.opaque
    if (end - start) * size < len(tokens):
        tokens = tokens[start * size : end * size]
        mm_hashes = mm_hashes and mm_hashes[start:end]
        opaque = opaque and {at - start: opaque[at] for at in range(start, end) if at in opaque}
    if index.is_eagle:
        tokens, size = _windows_of_pairs(tokens, size), size + 1  # type: ignore[arg-type]
    local = block_hashes(
        # packed already; pairs only ever reach eagle scopes: `wire` ensures it
        tokens.tobytes() if is_packed(tokens) else tokens,  # type: ignore[arg-type, union-attr]
        size,
        namespace=namespace,
        mm_hashes=mm_hashes,
    )
    return unmatchable(local, opaque) if opaque else local


def _windows_of_pairs(pairs: list[tuple[int, int]], block_size: int) -> list[int]:
    """Tokens of each page of pairs: the first members, then the last pair's second."""
    tokens: list[int] = []
    for start in range(0, len(pairs), block_size):
        page = pairs[start : start + block_size]
        tokens.extend(first for first, _ in page)
        tokens.append(page[-1][1])
    return tokens
