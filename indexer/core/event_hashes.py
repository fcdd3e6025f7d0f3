"""Local hashes of a store event's blocks: of its tokens, media and opaque keys.

`writer.py` asks for them slice by slice; `hashing.py` has the hash itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from indexer.core.hashing import block_hashes, unmatchable
from indexer.core.packing import is_packed

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from indexer.core.events import BlockStored, Names
    from indexer.types import Namespace, PackedHashes

SLICE_BLOCKS: Final = 512
"""Blocks handed to the index at once, about 0.2 ms; longer events are sliced."""

CHECK_COST_BLOCKS: Final = SLICE_BLOCKS // 3
"""Cost of hashing a slice of a long store before any of it is written."""

COLOURED_SLICE_BLOCKS: Final = 64
"""Blocks with media or opaque keys hashed at once."""

_EXTRA_KEYS_COST: Final = 8  # blocks of tokens alone that are hashed in the time of one such block


class _Index(Protocol):
    """What is used of a `KvIndex`."""

    block_size: int
    is_eagle: bool


def slices_of(names: Names) -> Iterator[tuple[int, list[int]]]:
    """Yield the names of a long event in slices, with the start of each."""
    for start in range(0, len(names), SLICE_BLOCKS):
        yield start, list(names[start : start + SLICE_BLOCKS])


def has_extra_keys(event: BlockStored) -> bool:
    """Return whether its blocks depend on more than tokens."""
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


def hashes_in_steps(
    index: _Index, event: BlockStored, namespace: Namespace, start: int, end: int
) -> Generator[int, None, PackedHashes]:
    """Hash blocks with extra keys; yields the cost of each step, in blocks without.

    Raises:
        ValueError: as `local_hashes`.
    """
    hashes = []
    for at in range(start, end, COLOURED_SLICE_BLOCKS):
        until = min(at + COLOURED_SLICE_BLOCKS, end)
        hashes.append(local_hashes(index, event, namespace, at, until))
        yield COLOURED_SLICE_BLOCKS * _EXTRA_KEYS_COST
    return b"".join(hashes)


def _windows_of_pairs(pairs: list[tuple[int, int]], block_size: int) -> list[int]:
    """Tokens of each page of pairs: the first members, then the last pair's second."""
    tokens: list[int] = []
    for start in range(0, len(pairs), block_size):
        page = pairs[start : start + block_size]
        tokens.extend(first for first, _ in page)
        tokens.append(page[-1][1])
    return tokens
