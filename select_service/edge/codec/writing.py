"""Answers to bytes, in JSON and in MessagePack.

What is long in an answer are hashes. They travel packed, as a prompt has them, and become numbers
only here; those of a booking as a rule stand ready in the body it came with (`json_codec.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import msgspec

from indexer.compiled import usable
from indexer.core.hashing import unpack_i64
from indexer.types import HASH_BYTES, U64_MASK

if usable("select_service._speed", 7):
    from select_service._speed import signed_json

    def _printed(packed: PackedHashes) -> object:
        return msgspec.Raw(signed_json(packed))
else:
    _printed = unpack_i64

if TYPE_CHECKING:
    from collections.abc import Callable

    from indexer.types import PackedHashes

__all__ = [
    "ECHOED",
    "ShownHashes",
    "echo",
    "encode",
    "encode_capped",
    "encode_msgpack",
    "show_hashes",
]

ECHOED: Final = "sequence_hashes"
"""The member of a booking's body that its answer has, too."""

_OPENS: Final = f'"{ECHOED}":['.encode()
_ECHOED_BYTES_MAX: Final = 1 << 16  # kept until the next is read
_BLANK, _LINE_FEED, _RETURN, _TAB = b" \n\r\t"
_ZERO: Final = bytes(HASH_BYTES)
_POSITIVE: Final = bytes(range(128))  # as the highest byte of a number with a sign


class ShownHashes:
    """Hashes in an answer whose form is not known yet."""

    __slots__ = ("packed",)

    def __init__(self, packed: PackedHashes) -> None:
        self.packed = packed


show_hashes = cast("Callable[[PackedHashes], list[int]]", ShownHashes)
"""Returns hashes as an answer carries them: signed numbers in JSON, packed in MessagePack."""


class Echo:
    """The hashes that were read last, as they stood there if an answer would print them just so.

    A booking is answered with the hashes it came with: as a rule before anything else is read, and
    then nothing needs to be printed. Known by the very object: what is equal may be another's.
    """

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: tuple[PackedHashes, msgspec.Raw] = b"", msgspec.Raw(b"[]")

    def note(self, packed: PackedHashes, text: bytes) -> None:
        """Note hashes with the text an answer would have of them."""
        self.last = packed, msgspec.Raw(text)

    def note_in(self, body: bytes, packed: object) -> None:
        """Note the hashes as they stand in a flat body, if an answer would print them so.

        In such a body nothing else can look like that member: strings have no quotes in them.
        Half of what printing them costs.
        """
        opening = body.find(_OPENS) + len(_OPENS) - 1
        if not isinstance(packed, bytes) or opening < len(_OPENS):
            return
        text = _compact_at(opening, body, packed)
        if not text:
            return
        minuses = len(text) - len(text.replace(b"-", b""))  # half of what counting them takes
        negative = len(packed[HASH_BYTES - 1 :: HASH_BYTES].translate(None, _POSITIVE))
        if minuses == negative:
            self.note(packed, text)

    def note_signed(self, body: bytes, opening: int, packed: PackedHashes) -> None:
        """Do the same where all are known to stand there, from a bracket on, with their signs."""
        text = _compact_at(opening, body, packed)
        if text:
            self.last = packed, msgspec.Raw(text)


def _compact_at(opening: int, body: bytes, packed: PackedHashes) -> bytes:
    """Return the array of these hashes in a flat body, b"" if there are blanks in it or zeros."""
    text = body[opening : body.find(b"]", opening) + 1]
    if (
        len(text) > _ECHOED_BYTES_MAX
        or _BLANK in text
        or _LINE_FEED in text
        or _RETURN in text
        or _TAB in text
        or packed.find(_ZERO) >= 0  # it may stand there as -0
    ):
        return b""
    return text


echo: Final = Echo()


def _in_json(shown: object) -> object:
    if type(shown) is not ShownHashes:
        return _packed_in(shown)
    packed, text = echo.last
    return text if shown.packed is packed else _printed(shown.packed)


def _packed_in(shown: object) -> PackedHashes:
    """Return what the encoders cannot know; anything else is a bug, or odd news for the log."""
    if isinstance(shown, ShownHashes):
        return shown.packed
    raise TypeError(f"no form for {type(shown).__name__}")


encode: Final = msgspec.json.Encoder(enc_hook=_in_json).encode
encode_msgpack: Final = msgspec.msgpack.Encoder(enc_hook=_packed_in).encode


def encode_capped(answer: object) -> bytes:
    """Write in MessagePack what has numbers it cannot say: as the nearest it can.

    Only sums are like that (two prompts of 2^64-1 tokens each), so this need not be quick.
    """
    plain = msgspec.to_builtins(answer, enc_hook=_plain_in, builtin_types=(bytes,))
    return encode_msgpack(_capped(plain))


def _plain_in(part: object) -> object:
    """Return what `to_builtins` cannot know; what is written already is read again."""
    return msgspec.msgpack.decode(part) if isinstance(part, msgspec.Raw) else _packed_in(part)


def _capped(value: object) -> object:
    if isinstance(value, dict):
        return {name: _capped(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_capped(one) for one in value]
    return min(max(value, -(1 << 63)), U64_MASK) if isinstance(value, int) else value
