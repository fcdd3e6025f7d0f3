"""What goes into a block's hash besides its tokens: salts, media items, opaque keys.

Engines write these in three ways: vLLM's `extra_keys`, TensorRT-LLM's `mm_keys` and Dynamo's
`block_mm_infos`. `wire` calls this module and puts the result into the block hashes, so that a
block only matches a request that agrees on everything it depends on. When in doubt a block is
opaque, never plain.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from msgspec import msgpack

from indexer.types import U64_MASK

if TYPE_CHECKING:
    from collections.abc import Sequence

_HASH_DIGITS: Final = 16  # requests identify a media item by the first 16 hex digits
_MEDIA_ID: Final = re.compile(r"[0-9a-fA-F]{16,}")
_BARE_MEDIA_ID: Final = re.compile(r"[0-9a-fA-F]{64}")  # vLLM 0.17 wrote identifiers without offset


def media_hash(identifier: str) -> int | None:
    """By what requests name a media item, given an engine's identifier; None: they cannot."""
    return int(identifier[:_HASH_DIGITS], 16) if _MEDIA_ID.fullmatch(identifier) else None


def is_ambiguous_salt(salt: str) -> bool:
    """Whether arrays of vLLM 0.17 to 0.19 write this salt as they write a media item.

    Nothing tells the two apart there, and it is taken for a media item.
    """
    return _BARE_MEDIA_ID.fullmatch(salt) is not None


class ExtraKeys:
    """The extra keys of the blocks of one store event, in each way that engines write them.

    Attributes:
        salt: Of the whole prompt; "" for none.
    """

    __slots__ = ("_blocks", "_media", "_opaque", "salt")

    def __init__(
        self,
        blocks: int,
        extra_keys: Sequence[list[object] | None] | None,
        mm_keys: Sequence[list[object] | None] | None,
        mm_infos: Sequence[dict[str, object] | None] | None,
        *,
        lora_name: str,
        is_root: bool,
        has_bare_media: bool,
    ) -> None:
        """Read what there is.

        Args:
            blocks: their number.
            extra_keys: vLLM's: adapter name, media items, salt, digest of prompt embeddings.
            mm_keys: TensorRT-LLM's: `{"type": "mm_key", "hash": hex, "start_offset": n}`.
            mm_infos: Dynamo's: `{"mm_objects": [{"mm_hash": u64, "offsets": …}]}`.
            lora_name: of the event; "" for none.
            is_root: whether the first block begins a sequence.
            has_bare_media: whether media items are bare identifiers of 64 hex digits, and no lists.

        Raises:
            ValueError: Not one entry per block.
        """
        self._blocks = blocks
        self._media: dict[int, list[int]] = {}
        self._opaque: dict[int, bytes] = {}
        self.salt = ""
        for per_block in (extra_keys, mm_keys, mm_infos):
            if per_block and len(per_block) != blocks:
                raise ValueError(f"{len(per_block)} entries for {blocks} blocks")
        for block, keys in enumerate(extra_keys or ()):
            if keys:
                # the adapter's name comes first in every block; a salt may be the same text, but
                # follows it
                rest = keys[1:] if lora_name and keys[0] == lora_name else keys
                may_be_salted = is_root and block == 0
                self._read_keys(
                    block, rest, may_be_salted=may_be_salted, has_bare_media=has_bare_media
                )
        for block, items in enumerate(mm_keys or ()):
            for key in items or ():
                self._add_media(block, key.get("hash") if isinstance(key, dict) else key)
        for block, info in enumerate(mm_infos or ()):
            objects = info.get("mm_objects") if info else ()
            for item in objects if isinstance(objects, list) else ():
                mm_hash = item.get("mm_hash") if isinstance(item, dict) else None
                if type(mm_hash) is int:
                    self._media.setdefault(block, []).append(mm_hash & U64_MASK)
                else:
                    self._add_opaque(block, item)

    @property
    def media(self) -> list[list[int]] | None:
        """Hashes of the media items in each block; None if no block has any."""
        if not self._media:
            return None
        return [self._media.get(block, []) for block in range(self._blocks)]

    @property
    def opaque(self) -> dict[int, bytes] | None:
        """Block → bytes that make it differ from every block a request can describe."""
        return self._opaque or None

    def _read_keys(
        self, block: int, keys: Sequence[object], *, may_be_salted: bool, has_bare_media: bool
    ) -> None:
        for key in keys:
            if isinstance(key, list):
                self._add_media(block, key[0] if key else None)
            elif not isinstance(key, str):
                self._add_opaque(block, key)
            elif has_bare_media and _BARE_MEDIA_ID.fullmatch(key):
                self._add_media(block, key)
            elif may_be_salted and not self.salt:
                self.salt = key
            else:
                self._add_opaque(block, key)

    def _add_media(self, block: int, identifier: object) -> None:
        hashed = media_hash(identifier) if isinstance(identifier, str) else None
        if hashed is not None:
            self._media.setdefault(block, []).append(hashed)
        else:  # for example a name chosen by a user: no query could match it
            self._add_opaque(block, identifier)

    def _add_opaque(self, block: int, key: object) -> None:
        self._opaque[block] = self._opaque.get(block, b"") + msgpack.encode(key)
