"""Finds the member names of a JSON object, which a typed decoder does not report.

msgspec keeps the last of two members with one name and skips unknown names; the contract wants the
first refused and the second reported. Everything here reads bytes that msgspec has already accepted
as JSON of the right shape. `json_codec.py` calls it.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

_COLON: Final = ord(":")
_SPACE: Final = ord(" ")
_BLANKS: Final = b" \t\r\n"
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NO_STEP: Final = bytes(set(range(256)) - set(b"{}[]"))
_STEPS: Final = bytes.maketrans(b"{}[]", b"\x01\xff\x01\xff")
_NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b"{}[],"))
_SHORT_BYTES: Final = 12
_FLAT_MAX: Final = 256
_STRUCTURE: Final = re.compile(rb"\[,*\]|,+|[{}\[\]]")  # an array of numbers is one token


class DuplicateMemberError(ValueError):
    """A name occurs twice in one object; `path` is where, as in `pinned_worker.dp_rank`."""

    def __init__(self, path: str) -> None:
        super().__init__(f"duplicate field `{path}`")
        self.path = path


def flat_names(body: bytes) -> list[bytes] | None:
    """Return the names in an object without inner objects; None if that is not certain.

    The regular request is such an object: a few short names and long runs of numbers. Hopping from
    quote to quote with `find` (memchr) costs the same 2 µs for 8 and for 8192 hashes; counting
    colons or splitting would read every byte a second time.
    """
    if body.find(b"{", 1) >= 0 or body.find(b"\\") >= 0:  # `in` takes twice as long
        return None
    find = body.find
    names: list[bytes] = []
    opening = find(b'"')
    while opening >= 0:
        closing = find(b'"', opening + 1)
        after = body[closing + 1]
        if after == _COLON:
            names.append(body[opening + 1 : closing])
            if len(names) > _FLAT_MAX:  # not a regular request
                return None
        elif after <= _SPACE:  # a colon may follow the blank
            return None
        opening = find(b'"', closing + 1)
    return names


def is_deeper(body: bytes, most: int) -> bool:
    """Return whether arrays and objects are nested deeper than `most`. Linear.

    Most bodies have too few brackets for that, which is checked first.
    """
    if body.count(b"[") + body.count(b"{") <= most:
        return False
    steps = np.frombuffer(_STRING.sub(b"", body).translate(_STEPS, _NO_STEP), dtype=np.int8)
    return bool(len(steps)) and int(steps.cumsum(dtype=np.int64).max()) > most


def without_items(body: bytes, items: Sequence[msgspec.Raw]) -> bytes:
    """Cut the items of an array out of a body, so that their names are not examined yet.

    Args:
        body: as it was decoded.
        items: all items of that array, as slices of the body.
    """
    if not items:
        return body
    start = _address(items[0]) - _address(body)
    end = _address(items[-1]) - _address(body) + len(memoryview(items[-1]))
    return body[:start] + body[end:]


def _address(text: bytes | msgspec.Raw) -> int:
    return int(np.frombuffer(text, dtype=np.uint8).ctypes.data)


def top_level_names(body: bytes, readable: frozenset[str]) -> list[str]:
    """Return the names of the outermost object in order, and refuse duplicate names.

    Args:
        body: one JSON object.
        readable: names whose objects (or arrays of objects) are read; the decoder skips what lies
            below other names, including duplicates.

    Raises:
        DuplicateMemberError: a name occurs twice in an object that is read.
    """
    # Same length, no escaped quotes: the next quote is the closing one. Backslashes pair up from
    # the left, so replacing pairs first leaves exactly the escaped quotes.
    plain = body.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in body else body
    find = plain.find
    levels: list[_Level] = []
    names: list[str] = []
    end, opening = 0, find(b'"')
    while opening >= 0:
        closing = find(b'"', opening + 1)
        gap = plain[end:opening]
        if gap != b":" and (gap != b"," or levels[-1].is_array):
            for token in _short_structure(gap) if len(gap) <= _SHORT_BYTES else _structure(gap):
                _step(levels, token, readable)
        end = closing + 1
        if plain[end] == _COLON or (plain[end] <= _SPACE and _colon_follows(plain, end)):
            name = _read_name(body[opening + 1 : closing])
            _note(levels, name)
            if len(levels) == 1:
                names.append(name)
        opening = find(b'"', end)
    return names


def _colon_follows(plain: bytes, position: int) -> bool:
    while plain[position] in _BLANKS:
        position += 1
    return plain[position] == _COLON


def _read_name(text: bytes) -> str:
    return msgspec.json.decode(b'"%s"' % text, type=str) if b"\\" in text else text.decode()


class _Level:
    """An object or array that is open at this point of the text."""

    __slots__ = ("index", "is_array", "is_read", "name", "seen")

    def __init__(self, *, is_array: bool, is_read: bool) -> None:
        self.is_array = is_array
        self.is_read = is_read
        self.index = 0  # of the current element
        self.name = ""  # of the current member
        self.seen: set[str] = set()


def _note(levels: list[_Level], name: str) -> None:
    level = levels[-1]
    level.name = name
    if level.is_read:
        if name in level.seen:
            raise DuplicateMemberError(_path(levels))
        level.seen.add(name)


def _structure(gap: bytes) -> list[bytes]:
    """Return the brackets and runs of commas in the text between two strings."""
    return _STRUCTURE.findall(gap.translate(None, _NOT_STRUCTURE))


_short_structure = functools.lru_cache(maxsize=1024)(_structure)
"""Nearly all gaps are `:`, `,`, `:{` and the like."""


def _step(levels: list[_Level], token: bytes, readable: frozenset[str]) -> None:
    if token in (b"}", b"]"):
        levels.pop()
    elif token in (b"{", b"["):
        outer = levels[-1] if levels else None
        is_read = outer is None or (outer.is_read and (outer.is_array or outer.name in readable))
        levels.append(_Level(is_array=token == b"[", is_read=is_read))
    elif levels[-1].is_array and token.startswith(b","):
        levels[-1].index += len(token)


def _path(levels: list[_Level]) -> str:
    return "".join(
        f"[{level.index}]" if level.is_array else f".{level.name}" for level in levels
    ).removeprefix(".")
