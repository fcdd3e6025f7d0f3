"""Tokens to block hashes to sequence hashes: the arithmetic every engine and client shares.

The formulas are in deploy/docs/contract.md, section 8.5: XXH3-64 over little-endian tokens, seeded
by the namespace. An *engine's* own block hash is opaque and never computed here. `writer` hashes
what workers announce, the service's `routing/read.py` what clients request; both must agree.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from indexer.compiled import usable
from indexer.core.packing import TOKEN_BYTES, pack_tokens, pack_u64
from indexer.types import BASE_NAMESPACE, HASH_BYTES, U64_MASK, Namespace, PackedHashes

if not TYPE_CHECKING and usable("indexer._speed", 3):
    from indexer._speed import sequence_hashes, window_hashes
else:
    from indexer.core.plain_hashing import sequence_hashes, window_hashes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["BASE_SEED", "block_hashes", "namespace_seed", "sequence_hashes", "unmatchable"]

BASE_SEED: Final = 1337
"""Seed of blocks without a namespace, and of every link of the chain in any namespace."""

NAMESPACES_REMEMBERED: Final = 4096
"""Seeds cached, enough for the names in daily use. One costs 0.3 µs to compute."""

_UNMATCHABLE_SEED: Final = 0x6F70617175650000  # arbitrary; no namespace is likely to have it


@lru_cache(maxsize=NAMESPACES_REMEMBERED)
def namespace_seed(namespace: Namespace) -> int:
    """Seed of the block hashes of one namespace; empty names mean none. O(length of the names)."""
    seed = BASE_SEED
    if namespace.lora_name:
        seed += xxh3_64_intdigest(namespace.lora_name.encode("utf-8", "surrogatepass"), 0)
    if namespace.cache_salt:
        seed += xxh3_64_intdigest(namespace.cache_salt.encode("utf-8", "surrogatepass"), 1)
    return seed & U64_MASK


def block_hashes(
    token_ids: Sequence[int] | bytes,
    block_size: int,
    *,
    namespace: Namespace = BASE_NAMESPACE,
    is_eagle: bool = False,
    mm_hashes: Sequence[Sequence[int]] | None = None,
) -> PackedHashes:
    """Return the local hash of every whole block of a prompt; a partial last block has none.

    About 0.2 µs per block of 16 tokens, a tenth of that from packed tokens with the kernel.

    Args:
        token_ids: Unsigned 32-bit token ids, or the same packed (`pack_tokens`).
        block_size: Tokens per block, at least 1.
        namespace: Adapter and salt the prompt runs under.
        is_eagle: Blocks are windows of `block_size + 1` tokens at a stride of `block_size`.
        mm_hashes: For block i, the hashes of the media items in it; a shorter list means none.

    Raises:
        ValueError: A token is not an unsigned 32-bit integer, a media hash does not fit 64 bits,
            or the block size is not positive.
    """
    if block_size < 1:
        msg = f"block size must be positive, not {block_size}"
        raise ValueError(msg)
    seed = BASE_SEED if namespace is BASE_NAMESPACE else namespace_seed(namespace)
    tokens = token_ids if isinstance(token_ids, bytes) else pack_tokens(token_ids)
    stride = block_size * TOKEN_BYTES
    width = stride + TOKEN_BYTES if is_eagle else stride
    if width > len(tokens):
        return b""
    local = window_hashes(tokens, stride, width, seed)
    if not mm_hashes:
        return local
    return _with_media(local, tokens, stride, width, seed, mm_hashes)


def _with_media(
    local: PackedHashes,
    tokens: bytes,
    stride: int,
    width: int,
    seed: int,
    mm_hashes: Sequence[Sequence[int]],
) -> PackedHashes:
    """Return the hashes with those of media blocks replaced; usually there are few."""
    hashes = bytearray(local)
    for i, media in zip(range(len(local) // HASH_BYTES), mm_hashes, strict=False):
        if media:
            window = tokens[i * stride : i * stride + width]
            items = pack_u64(sorted(m & U64_MASK for m in media))
            one = xxh3_64_digest(window + items, seed)[::-1]
            hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] = one
    return bytes(hashes)


def unmatchable(local: PackedHashes, extra_keys: Mapping[int, bytes]) -> PackedHashes:
    """Replace the hashes of some blocks (prompt embeddings, say) so that no request matches.

    Args:
        local: Local hashes computed from the tokens.
        extra_keys: Block number → bytes that distinguish it from other blocks with the same tokens.
    """
    hashes = [local[at : at + HASH_BYTES] for at in range(0, len(local), HASH_BYTES)]
    for block, colour in extra_keys.items():
        hashes[block] = xxh3_64_digest(hashes[block] + colour, _UNMATCHABLE_SEED)[::-1]
    return b"".join(hashes)
