"""A request becomes a Prompt: packed block hashes, packed sequence hashes, length in tokens.

One normal form for tokens, media and ready-made hashes; all later code sees only `Prompt`. The
refusals here are part of the contract, including texts and order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from indexer.core.hashing import (
    TOKEN_BYTES,
    block_hashes,
    pack_u64,
    sequence_hashes,
)
from indexer.types import HASH_BYTES, U64_MASK, Namespace
from select_service.errors import InvalidField, InvalidRequest, TooManyBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexer.types import PackedHashes
    from select_service.types import BlockMmInfo, HashList, PromptFields


BLOCKS_MAX: Final = (1 << 63) - 1
"""Unlimited: embedders set their own limit."""

_HASH_REST: Final = HASH_BYTES - 1


class Prompt:
    """What selection and ledger need to know of a prompt."""

    __slots__ = ("block_hashes", "blocks", "first_hash", "isl_tokens", "sequence_hashes")

    sequence_hashes: PackedHashes
    """Counted by the ledger; computed on first use, which most selections never reach."""

    def __init__(
        self, block_hashes: PackedHashes, chain: PackedHashes | None, isl_tokens: int
    ) -> None:
        """Combine the parts.

        Args:
            block_hashes: matched against the index; b"" if only a booking needs the prompt.
            chain: as many sequence hashes; None: computed from the block hashes.
            isl_tokens: length of the prompt.
        """
        self.block_hashes = block_hashes
        self.isl_tokens = isl_tokens
        known = block_hashes if chain is None else chain  # they begin alike
        self.blocks = len(known) // HASH_BYTES
        self.first_hash = known[:HASH_BYTES]
        """The first sequence hash, or b"": enough to tell whether any chain can match."""
        if chain is not None:
            self.sequence_hashes = chain

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> PackedHashes:
            """Compute the sequence hashes: called only as long as they are not set."""
            if name != "sequence_hashes":
                raise AttributeError(name)
            self.sequence_hashes = sequence_hashes(self.block_hashes)
            return self.sequence_hashes


def read_prompt(
    request: PromptFields, *, block_size: int, is_eagle: bool, blocks_max: int = BLOCKS_MAX
) -> Prompt:
    """Normalise the prompt of a selection; first match wins: media tokens, tokens, hashes.

    Raises:
        InvalidRequest: with the texts of the contract, in its order of complaint.
        InvalidField: a hash outside 64 bits.
        TooManyBlocks: the prompt exceeds the limit.
    """
    if request.token_ids is not None or request.mm_routing_info is not None:
        tokens = _read_tokens(request, block_size, blocks_max, is_eagle=is_eagle)
        if tokens is not None:
            return tokens
    if request.block_hashes is None:
        raise _missing("block_hashes")
    if request.sequence_hashes is None:
        raise _missing("sequence_hashes")
    if request.isl_tokens is None:
        raise _missing("isl_tokens")
    if request.isl_tokens == 0:
        raise _empty()
    local, chain = request.block_hashes, request.sequence_hashes
    if (  # the form in which the codec delivers nearly all
        type(local) is bytes
        and type(chain) is bytes
        and (size := len(local)) == len(chain)
        and not size & _HASH_REST
        and size <= blocks_max * HASH_BYTES
    ):
        return Prompt(local, chain, request.isl_tokens)
    blocks = _count(local, HASH_BYTES, "block_hashes")
    sequence = _count(chain, HASH_BYTES, "sequence_hashes")
    if blocks != sequence:
        raise InvalidRequest(
            f"block_hashes length {blocks} must match sequence_hashes length {sequence}",
            field="block_hashes",
        )
    if blocks > blocks_max:
        raise TooManyBlocks("block_hashes", blocks_max)
    return Prompt(_pack(local, "block_hashes"), _pack(chain, "sequence_hashes"), request.isl_tokens)


def read_booking(
    request: PromptFields, *, block_size: int, is_eagle: bool, blocks_max: int = BLOCKS_MAX
) -> Prompt:
    """Normalise the prompt of an explicit reservation; block hashes are not required.

    Raises:
        InvalidRequest: with the texts of the contract, in its order of complaint.
        InvalidField: a hash outside 64 bits.
        TooManyBlocks: the prompt exceeds the limit.
    """
    tokens = _read_tokens(request, block_size, blocks_max, is_eagle=is_eagle)
    if tokens is not None:
        return tokens
    if request.sequence_hashes is None:
        raise _missing("sequence_hashes")
    if request.isl_tokens is None:
        raise _missing("isl_tokens")
    _check_unread(request.block_hashes, "block_hashes")
    if _count(request.sequence_hashes, HASH_BYTES, "sequence_hashes") > blocks_max:
        raise TooManyBlocks("sequence_hashes", blocks_max)
    return Prompt(b"", _pack(request.sequence_hashes, "sequence_hashes"), request.isl_tokens)


def _read_tokens(
    request: PromptFields, block_size: int, blocks_max: int, *, is_eagle: bool
) -> Prompt | None:
    media = request.mm_routing_info
    if media is not None and len(media.routing_token_ids):
        token_ids: list[int] | bytes | None = media.routing_token_ids
        infos: Sequence[BlockMmInfo | None] | None = media.block_mm_infos
    else:
        token_ids, infos = request.token_ids, request.block_mm_infos
    if token_ids is None:
        return None
    if not len(token_ids):  # works for arrays, too
        raise _empty()
    _check_unread(request.block_hashes, "block_hashes")
    _check_unread(request.sequence_hashes, "sequence_hashes")
    tokens = _count(token_ids, TOKEN_BYTES, "token_ids")
    if tokens > (blocks_max + 1) * block_size - 1:  # checked before hashing
        raise TooManyBlocks("token_ids", blocks_max)
    local = block_hashes(
        token_ids,
        block_size,
        namespace=Namespace(
            request.lora_name or "", request.cache_salt or request.cache_namespace or ""
        ),
        is_eagle=is_eagle if request.is_eagle is None else request.is_eagle,
        mm_hashes=_media_hashes(infos) if infos else None,
    )
    return Prompt(local, None, tokens)


def _media_hashes(infos: Sequence[BlockMmInfo | None]) -> list[list[int]]:
    return [[] if info is None else [item.mm_hash for item in info.mm_objects] for info in infos]


def _count(numbers: list[int] | bytes, width: int, field: str) -> int:
    """Return the number of values; packed ones must be complete."""
    if not isinstance(numbers, bytes):
        return len(numbers)
    count, rest = divmod(len(numbers), width)
    if rest:
        raise InvalidField(f"{field}: packed numbers take {width} bytes each", field=field)
    return count


def _pack(hashes: HashList, field: str) -> PackedHashes:
    if isinstance(hashes, bytes):
        return hashes
    try:
        return pack_u64(hashes)
    except ValueError as error:
        raise InvalidField(f"{field}: {error}", field=field) from None


def _check_unread(hashes: HashList | None, field: str) -> None:
    """Check that hashes not needed in this form of the prompt are 64 bits wide all the same."""
    if hashes is None or not len(hashes):
        return
    if isinstance(hashes, bytes):
        _count(hashes, HASH_BYTES, field)
    elif max(hashes) > U64_MASK:
        raise InvalidField(f"{field}: must be at most 2^64-1", field=field)


def _missing(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is required without token_ids", field=field)


def _empty() -> InvalidRequest:
    return InvalidRequest("isl_tokens must be greater than 0", field="isl_tokens")
