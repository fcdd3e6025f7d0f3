"""Tokens to block hashes to sequence hashes: the arithmetic every engine and client shares.

Formulas are those of the reference (events section 11): XXH3-64 over little-endian tokens, seeded
by the namespace. What an *engine* calls its block hash is opaque and never computed here. The
stream hashes what workers announce, the service what clients ask: both must get the same numbers.
"""

from __future__ import annotations

import struct
import sys
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from indexer.types import BASE_NAMESPACE, HASH_BYTES, U64_MASK, Namespace, PackedHashes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

BASE_SEED: Final = 1337
"""Seed of a plain block, and of every link of the chain, whatever its namespace."""

TOKEN_BYTES: Final = 4
NAMESPACES_REMEMBERED: Final = 4096
"""Seeds kept ready. One costs 0.3 µs to compute: enough to cover the names in daily use."""

_UNMATCHABLE_SEED: Final = 0x6F70617175650000  # any seed that no namespace is likely to have
_I64_MIN: Final = -(1 << 63)
_SWAP: Final = sys.byteorder == "big"  # `array` packs in the order of the machine


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
    token_ids: Sequence[int],
    block_size: int,
    *,
    namespace: Namespace = BASE_NAMESPACE,
    is_eagle: bool = False,
    mm_hashes: Sequence[Sequence[int]] | None = None,
) -> PackedHashes:
    """Local hash of every whole block of a prompt; what is left over at the end has none.

    About 0.2 µs per block of 16 tokens.

    Args:
        token_ids: Unsigned 32-bit token ids.
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
    tokens = _pack_tokens(token_ids)
    if not mm_hashes and not is_eagle:
        return _plain_hashes(tokens, block_size * TOKEN_BYTES, seed)
    windows = _windows(tokens, block_size, is_eagle=is_eagle)
    if not mm_hashes:
        return _pack_array("Q", [xxh3_64_intdigest(window, seed) for window in windows])
    out: list[int] = []
    for i, window in enumerate(windows):
        media = mm_hashes[i] if i < len(mm_hashes) else ()
        data = window + pack_u64(sorted(m & U64_MASK for m in media)) if media else window
        out.append(xxh3_64_intdigest(data, seed))
    return _pack_array("Q", out)


def sequence_hashes(local: PackedHashes) -> PackedHashes:
    """Chain local hashes: entry i stands for the whole prefix up to block i. 0.2 µs a block."""
    previous = local[:HASH_BYTES]
    chain = [previous]
    link = xxh3_64_digest  # canonical digest is big-endian, hence the reversal
    for at in range(HASH_BYTES, len(local), HASH_BYTES):
        previous = link(previous + local[at : at + HASH_BYTES], BASE_SEED)[::-1]
        chain.append(previous)
    return b"".join(chain)


def unmatchable(local: PackedHashes, colours: Mapping[int, bytes]) -> PackedHashes:
    """Give some blocks a hash that no request can ask for, such as those of prompt embeddings.

    Args:
        local: Local hashes as the tokens give them.
        colours: Block number → bytes that tell it from other blocks of the same tokens.
    """
    hashes = [local[at : at + HASH_BYTES] for at in range(0, len(local), HASH_BYTES)]
    for block, colour in colours.items():
        hashes[block] = xxh3_64_digest(hashes[block] + colour, _UNMATCHABLE_SEED)[::-1]
    return b"".join(hashes)


def pack_u64(values: Sequence[int]) -> PackedHashes:
    """Pack hashes written as signed or unsigned 64-bit numbers; both spellings give the same bytes.

    Raises:
        ValueError: A value is not an integer in [-2^63, 2^64).
    """
    # all unsigned or all signed in one C call; a wrong guess stops at its first misfit, soon
    for form in ("Q", "q"):
        try:
            return _pack_array(form, values)
        except OverflowError:
            continue
        except TypeError as error:
            raise ValueError(str(error)) from None
    if min(values) < _I64_MIN or max(values) > U64_MASK:
        msg = "hash does not fit 64 bits"
        raise ValueError(msg)
    return _pack_array("Q", [value & U64_MASK for value in values])


def unpack_u64(packed: PackedHashes) -> list[int]:
    """The hashes as unsigned numbers."""
    return list(struct.unpack(f"<{len(packed) // HASH_BYTES}Q", packed))


def unpack_i64(packed: PackedHashes) -> list[int]:
    """The hashes as signed numbers, the way the HTTP API prints them."""
    return list(struct.unpack(f"<{len(packed) // HASH_BYTES}q", packed))


def _pack_tokens(token_ids: Sequence[int]) -> bytes:
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        msg = f"token ids must be unsigned 32-bit integers: {error}"
        raise ValueError(msg) from None
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def _pack_array(form: str, values: Sequence[int]) -> PackedHashes:
    packed = array(form, values)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def _plain_hashes(tokens: bytes, stride: int, seed: int) -> PackedHashes:
    if len(tokens) == stride:  # a decode step's block
        return xxh3_64_digest(tokens, seed)[::-1]
    left_over = len(tokens) % stride
    if left_over:
        tokens = tokens[:-left_over]
    if not tokens:
        return b""
    # unpacking slices in C: half the price of slicing in a loop
    cut = struct.iter_unpack(f"{stride}s", tokens)
    return _pack_array("Q", [xxh3_64_intdigest(window, seed) for (window,) in cut])


def _windows(tokens: bytes, block_size: int, *, is_eagle: bool) -> Iterator[bytes]:
    stride = block_size * TOKEN_BYTES
    width = stride + TOKEN_BYTES if is_eagle else stride
    for at in range(0, len(tokens) - width + 1, stride):
        yield tokens[at : at + width]
