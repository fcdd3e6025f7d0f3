"""Takes the long arrays of numbers out of a JSON body, so that only they are read as such.

The plain twin of `Scanner` in `_speed.pyx`: what it takes out is the same, but it takes less. A list
of plain integers costs msgspec a tenth less than one whose bounds it checks, and packing checks
them; names are looked for in what is left, which is short. Whatever is unusual (objects inside,
backslashes, blanks in odd places, anything wrong) is left to the typed decoding of the whole body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from indexer.core.packing import pack_tokens, pack_u64
from select_service.edge.members import flat_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Scanner"]

_ARRAYS_MAX: Final = 16  # of any kind, in a body that is looked at here
_COLONS: Final = (b":", b": ")  # behind the quote of a name
_numbers: Final = msgspec.json.Decoder(list[int]).decode


class Scanner:
    """Knows the members of one type of request. Holds no state between calls."""

    __slots__ = ("_arrays", "_names")

    def __init__(
        self, names: Iterable[bytes], hashes: Iterable[bytes], tokens: Iterable[bytes]
    ) -> None:
        """Prepare the table.

        Args:
            names: of the members that are known.
            hashes: of those, which hold 64-bit hashes.
            tokens: of those, which hold 32-bit tokens.
        """
        self._names = frozenset(names)
        self._arrays: dict[bytes, tuple[str, Callable[[list[int]], bytes]]] = {
            **{name: (name.decode(), pack_u64) for name in hashes},
            **{name: (name.decode(), pack_tokens) for name in tokens},
        }

    def scan(self, body: bytes) -> tuple[bytes, bool, list[tuple[str, bytes]]] | None:
        """Take the long arrays out of a body.

        Returns:
            None when the body is unusual or wrong, else (skeleton, plain, arrays): the same JSON
            with `[]` in place of the arrays; whether all its names are known and none comes twice;
            (name, packed little-endian numbers) of the arrays. That the skeleton is JSON is for
            its reader to find out; a body that is none is none without its arrays, too.
        """
        arrays: list[tuple[str, bytes]] = []
        kept: list[bytes] = []
        rest = body
        for _ in range(_ARRAYS_MAX):
            before, opening, rest = rest.partition(b"[")
            kept.append(before)
            if not opening:
                break
            kept.append(opening)
            named, _, colon = before.rpartition(b'"')
            array = self._arrays.get(named.rpartition(b'"')[2]) if colon in _COLONS else None
            if array is not None:
                numbers, closing, rest = rest.partition(b"]")
                kept.append(closing)
                try:
                    arrays.append((array[0], array[1](_numbers(b"[%b]" % numbers))))
                except (ValueError, RecursionError):
                    return None
        else:
            return None
        skeleton = b"".join(kept)
        # Without backslashes and other objects every second quote closes, and every name is one of
        # the outermost object: no array above was part of a string, or of somebody else's.
        names = flat_names(skeleton)
        if names is None:
            return None
        return skeleton, self._names.issuperset(names) and len(set(names)) == len(names), arrays
