"""Packs the long arrays of a body without an object for each number, by means of simdjson.

For a body without inner objects it creates the whole request, in half the time that msgspec and
packing take. This is the Python twin of `Scanner` in `_speed.pyx`; if simdjson is not installed, or
a body is unusual or wrong, `json_codec.py` decodes it the plain way.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from select_service.edge.codec.writing import ECHOED, echo

try:
    from simdjson import Array, Parser
except ImportError:  # some interpreters have no wheel
    Array = Parser = None  # type: ignore[assignment, misc]

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import TypeAlias

    from numpy.typing import NDArray

    _Sign: TypeAlias = Literal["i", "u"]

__all__ = ["PlainScanner"]

D = TypeVar("D")

IS_USABLE: Final = Parser is not None and sys.byteorder == "little"
"""Buffers have the machine's byte order, packed numbers are little-endian."""

SCANNED_BYTES_MAX: Final = 1 << 20
"""Longest body scanned: the parser keeps 14 times as much memory as the longest it has read."""

_PLANS_MAX: Final = 256
"""Clients need only a few; bounded against those that permute their members."""

_BACKSLASH: Final = ord("\\")
_U32_MAX: Final = (1 << 32) - 1
_REFUSALS: Final = (ValueError, TypeError, AttributeError, RuntimeError, MemoryError)
"""The parser's: invalid JSON; numbers out of range; not an array; in use by another thread; too
large."""


class _Plan(NamedTuple):
    """How to read the members of a body, cached by their names in order."""

    longs: tuple[tuple[str, bool], ...]  # arrays of numbers, and whether they are hashes
    simple: tuple[tuple[str, type], ...]  # members with only a type to check
    others: tuple[str, ...]
    parts: int  # strings, objects and arrays, without the contents of `others`
    shown: bool  # whether an answer may repeat part of it


class PlainScanner(Generic[D]):
    """Creates requests of one type."""

    __slots__ = (
        *("_decoded", "_echoes", "_kind", "_longs", "_parse", "_plans", "_signs", "_simple"),
    )

    def __init__(
        self,
        kind: type[msgspec.Struct],
        decoded: Callable[[Any, None, bytes], D],
        longs: Mapping[str, bool],
        wholes: Collection[str],
        *,
        echoes: bool,
    ) -> None:
        """Prepare.

        Args:
            kind: of requests.
            decoded: wraps a request with no warning and no unknown members.
            longs: members to pack, and whether they hold hashes or tokens.
            wholes: members only required to be 64-bit numbers.
            echoes: whether answers repeat the sequence hashes.
        """
        assert IS_USABLE
        self._kind = kind
        self._decoded = decoded
        self._longs = longs
        self._echoes = echoes
        self._simple: dict[str, type] = dict.fromkeys(_texts_of(kind), str)
        self._simple.update(dict.fromkeys(wholes, int))
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._signs: tuple[_Sign, _Sign] = "i", "u"  # the last hashes were signed, or not
        self._parse = Parser(SCANNED_BYTES_MAX).parse

    def scan(  # noqa: C901, PLR0912 - one straight path, as every request pays for it
        self, body: bytes, small_bytes: int = 0
    ) -> D | None:
        """Return the request of a body; None if that is unusual or wrong.

        Args:
            body: as received.
            small_bytes: longer bodies may have to be counted.
        """
        find = body.find
        if body.rfind(b"{") or _BACKSLASH in body:
            return None
        try:
            document: Any = self._parse(body)
            names = tuple(document)
            plan = self._plans.get(names) or self._plan(names)
            longs, simple, others, parts, shown = plan
            if len(body) > small_bytes and (others or 2 * parts > small_bytes):
                return None
            members: dict[str, Any] = {}
            before = signs = self._signs
            at = echoed_at = 0
            for name, is_hashes in longs:
                array = document[name]
                try:
                    buffer = array.as_buffer(of_type=signs[0])
                except ValueError:
                    self._signs = signs = signs[::-1]
                    buffer = array.as_buffer(of_type=signs[0])
                members[name] = b"".join((buffer,)) if is_hashes else _as_tokens(buffer)
                at = find(b"[", at) + 1
                if name == ECHOED:
                    echoed_at = at - 1
            for name, kind in simple:
                value = members[name] = document[name]
                if type(value) is not kind:
                    return None
            for name in others:
                value = document[name]
                if type(value) is Array:
                    at, value = find(b"[", at) + 1, value.as_list()
                members[name] = value
            if find(b"[", at) >= 0:  # a nested array, which buffers flatten
                return None
            request = self._convert(members) if others else self._kind(**members)
        except _REFUSALS:
            return None
        # Without others, certainly no other array precedes one of numbers.
        if shown and self._echoes and signs is before and signs[0] == "i" and not others:
            echo.note_signed(body, echoed_at, members[ECHOED])
        return self._decoded(request, None, b"")

    def _plan(self, names: tuple[str, ...]) -> _Plan:
        """Return how to read a body with these members.

        Raises:
            ValueError: one of them is unknown, or occurs twice.
        """
        if len(frozenset(names)) != len(names) or not frozenset(names) <= self._known:
            raise ValueError("an unusual body")
        plan = _Plan(
            tuple((name, self._longs[name]) for name in names if name in self._longs),
            tuple((name, self._simple[name]) for name in names if name in self._simple),
            tuple(name for name in names if name not in self._simple and name not in self._longs),
            3 * len(names) + 1,
            ECHOED in names,
        )
        if len(self._plans) >= _PLANS_MAX:
            self._plans.clear()
        self._plans[names] = plan
        return plan

    @property
    def _known(self) -> frozenset[str]:
        return frozenset(self._kind.__struct_encode_fields__)

    def _convert(self, members: dict[str, object]) -> msgspec.Struct:
        """Create a request with members other than texts and numbers."""
        rest = {name: value for name, value in members.items() if name not in self._longs}
        request = msgspec.convert(rest, self._kind)
        for name in members.keys() - rest.keys():
            setattr(request, name, members[name])
        return request


def _as_tokens(buffer: Any) -> bytes:
    """Pack 64-bit numbers as tokens.

    Raises:
        ValueError: one of them is out of range.
    """
    numbers: NDArray[np.uint64] = np.frombuffer(buffer, dtype=np.uint64)  # negatives wrap
    if len(numbers) and numbers.max() > _U32_MAX:
        raise ValueError("no token")
    return numbers.astype(np.uint32).tobytes()


def _texts_of(kind: type[msgspec.Struct]) -> list[str]:
    """Return the members that are only required to be texts."""
    node = msgspec.inspect.type_info(kind)
    assert isinstance(node, msgspec.inspect.StructType)
    return [
        field.name
        for field in node.fields
        if any(one == _TEXT for one in _alternatives(field.type))
        and all(one in _TEXT_OR_NOT for one in _alternatives(field.type))
    ]


def _alternatives(node: msgspec.inspect.Type) -> tuple[msgspec.inspect.Type, ...]:
    return node.types if isinstance(node, msgspec.inspect.UnionType) else (node,)


_TEXT: Final = msgspec.inspect.StrType()
_TEXT_OR_NOT: Final = (_TEXT, msgspec.inspect.NoneType())  # UNSET does not appear as a type there
