"""How much a body may hold, asked before anybody makes objects of it.

No count of bytes tells what reading costs: eight megabytes of empty strings held the loop for more
than a second before they were refused. Long bodies are counted first, which takes a millisecond a
megabyte; those that cannot hold too much are not looked at. `codec` and `msgpack_codec` ask.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from select_service.errors import BodyTooLarge, InvalidField

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "NUMBERS_MAX",
    "PARTS_MAX",
    "SHORT_BODY_BYTES_MAX",
    "may_hold_many",
    "refuse_bulk",
    "refuse_long",
    "refuse_many_numbers",
    "refuse_parts",
]

PARTS_MAX: Final = 16_384
"""Strings, objects and arrays in a body that is not just a few names and numbers: each is looked at
for a microsecond or two, all of them in one go. Of items that are read one by one each has as many.
"""

NUMBERS_MAX: Final = 1 << 20
"""Numbers of one body that are written as such: a million tokens. All are read in one go, 40 ms of
JSON where they are no array of a prompt. Packed ones of MessagePack are not counted."""

SHORT_BODY_BYTES_MAX: Final = 1 << 21
"""Bytes of a body that has no place for a prompt: the longest worker record has eight thousand
endpoints. `--max-body-bytes` may be less."""

_SMALL_BYTES: Final = 2 * PARTS_MAX  # of a body that cannot hold more parts than that
_PIECE_BYTES: Final = 1 << 16


def may_hold_many(text: bytes) -> bool:
    """Tell whether a body is long enough to be counted."""
    return len(text) > _SMALL_BYTES


def refuse_bulk(kind: type[msgspec.Struct], body: bytes) -> None:
    """Refuse a body of JSON that is longer than anything of its type could sensibly be.

    Raises:
        BodyTooLarge: the type has no place for long runs of numbers.
        InvalidField: it has, and there are too many.
    """
    refuse_long(kind, body)
    if len(body) > 2 * NUMBERS_MAX:
        refuse_many_numbers(_count(body, ","))


def refuse_long(kind: type[msgspec.Struct], body: bytes) -> None:
    """Refuse a body of a type without a place for a prompt.

    Raises:
        BodyTooLarge: it is longer than any of those needs to be.
    """
    if len(body) > SHORT_BODY_BYTES_MAX and not _is_long(kind):
        raise BodyTooLarge(
            f"the body is longer than {SHORT_BODY_BYTES_MAX} bytes, and has no prompt"
        )


def refuse_parts(text: bytes) -> None:
    """Refuse JSON of too many small things; what is counted is about their number, never fewer.

    Raises:
        InvalidField: there are too many.
    """
    if _count(text, '"') // 2 + _count(text, "{") + _count(text, "[") > PARTS_MAX:
        raise InvalidField(f"more than {PARTS_MAX} strings, objects and arrays")


def refuse_many_numbers(numbers: int, field: str | None = None) -> None:
    """Refuse more numbers than are read in one go.

    Raises:
        InvalidField: there are too many.
    """
    if numbers > NUMBERS_MAX:
        where = f"{field}: " if field else ""
        raise InvalidField(f"{where}more than {NUMBERS_MAX} numbers", field=field)


def _count(text: bytes, character: str) -> int:
    """`text.count(character)`, which is five times as slow where there are many."""
    if len(text) <= _SMALL_BYTES:
        return text.count(character.encode())
    view, code = np.frombuffer(text, dtype=np.uint8), ord(character)
    # piece by piece: what is compared then stays in the processor's cache
    return sum(
        int(np.count_nonzero(view[at : at + _PIECE_BYTES] == code))
        for at in range(0, len(view), _PIECE_BYTES)
    )


@functools.cache
def _is_long(kind: type[msgspec.Struct]) -> bool:
    """Tell whether a type has arrays of numbers, or items that are read later."""

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
