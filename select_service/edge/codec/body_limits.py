"""Limits on what a body may contain, checked before objects are made of it.

The length in bytes does not show the cost of decoding: eight megabytes of empty strings held the
loop for more than a second before they were refused. So the contents of long bodies are counted
first, a millisecond per megabyte; bodies too short to cross a limit are not counted. `json_codec`
and `msgpack_codec` call this.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from select_service.errors import BodyTooLarge, TooMuchInBody
from select_service.types import BodyLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHORT_BYTES: Final = 1 << 15  # up to this, bytes.count is fast enough
_PIECE_BYTES: Final = 1 << 16


class BodyGuard:
    """Refuses bodies that contain too much. All decoders of a service share one.

    Attributes:
        limits: those in force.
        small_bytes: bodies up to this length cannot cross any limit but the depth.
    """

    __slots__ = ("limits", "small_bytes")

    def __init__(self, limits: BodyLimits | None = None) -> None:
        """Apply these limits, or the default ones."""
        self.follow(limits or BodyLimits())

    def follow(self, limits: BodyLimits) -> None:
        """Apply other limits from now on."""
        self.limits = limits
        things = 2 * min(limits.parts_max, limits.numbers_max)  # each takes two bytes at least
        lengths = limits.short_bytes_max, limits.unknown_bytes_max, limits.media_bytes_max
        self.small_bytes = min(things, *lengths)

    def refuse_bulk(self, kind: type[msgspec.Struct], body: bytes) -> None:
        """Refuse a JSON body that is longer than any sensible one of its type.

        Raises:
            BodyTooLarge: the type has no place for long runs of numbers.
            TooMuchInBody: it has, and there are too many.
        """
        self.refuse_long(kind, body)
        if len(body) > 2 * self.limits.numbers_max:
            self.refuse_many_numbers(_count(body, ","))

    def refuse_long(self, kind: type[msgspec.Struct], body: bytes) -> None:
        """Refuse a long body of a type without a place for a prompt.

        Raises:
            BodyTooLarge: it is longer than such types ever need.
        """
        most = self.limits.short_bytes_max
        if len(body) > most and not _is_long(kind):
            raise BodyTooLarge(
                f"the body is longer than {most} bytes, and has no prompt",
                limit="body_short_bytes_max",
            )

    def refuse_parts(self, text: bytes) -> None:
        """Refuse JSON with too many small values; the count is approximate, never too low.

        Raises:
            TooMuchInBody: there are too many.
        """
        most = self.limits.parts_max
        if _count(text, '"') // 2 + _count(text, "{") + _count(text, "[") > most:
            raise TooMuchInBody(f"more than {most} strings, objects and arrays", "body_parts_max")

    def refuse_many_parts(self, parts: int, what: str, field: str | None) -> None:
        """Refuse more of something than is examined in one go.

        Raises:
            TooMuchInBody: there are too many.
        """
        most = self.limits.parts_max
        if parts > most:
            raise TooMuchInBody(f"more than {most} {what}", "body_parts_max", field)

    def refuse_many_numbers(self, numbers: int, field: str | None = None) -> None:
        """Refuse more numbers than are read in one go.

        Raises:
            TooMuchInBody: there are too many.
        """
        most = self.limits.numbers_max
        if numbers > most:
            raise TooMuchInBody(f"more than {most} numbers", "body_numbers_max", field)

    def refuse_media(self, size: int, field: str) -> None:
        """Refuse an array of objects that is too long to be split before it is counted.

        Raises:
            TooMuchInBody: it is.
        """
        most = self.limits.media_bytes_max
        if size > most:
            raise TooMuchInBody(f"more than {most} bytes", "body_media_bytes_max", field)

    def refuse_unknown(self, size: int, field: str | None) -> None:
        """Refuse untyped content if making objects of it could take long.

        Raises:
            TooMuchInBody: it could.
        """
        most = self.limits.unknown_bytes_max
        if size > most:
            raise TooMuchInBody(f"more than {most} bytes", "body_unknown_bytes_max", field)


def _count(text: bytes, character: str) -> int:
    """Return `text.count(character)`, which itself is five times slower if there are many."""
    if len(text) <= _SHORT_BYTES:
        return text.count(character.encode())
    view, code = np.frombuffer(text, dtype=np.uint8), ord(character)
    # In pieces, so that the result of the comparison stays in the processor's cache.
    return sum(
        int(np.count_nonzero(view[at : at + _PIECE_BYTES] == code))
        for at in range(0, len(view), _PIECE_BYTES)
    )


@functools.cache
def _is_long(kind: type[msgspec.Struct]) -> bool:
    """Return whether a type has arrays of numbers, or items that are decoded later."""

    def holds(node: msgspec.inspect.Type) -> bool:
        if isinstance(node, msgspec.inspect.UnionType):
            return any(map(holds, node.types))
        if isinstance(node, msgspec.inspect.ListType):
            leaves = _alternatives(node.item_type)
            longs = (msgspec.inspect.IntType, msgspec.inspect.RawType)
            return any(isinstance(leaf, longs) for leaf in leaves) or holds(node.item_type)
        if isinstance(node, msgspec.inspect.StructType):
            return any(holds(field.type) for field in node.fields)
        return False

    return holds(msgspec.inspect.type_info(kind))


def _alternatives(node: msgspec.inspect.Type) -> Sequence[msgspec.inspect.Type]:
    return node.types if isinstance(node, msgspec.inspect.UnionType) else (node,)
