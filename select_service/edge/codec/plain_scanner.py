"""A body's long arrays become packed numbers without an object for each: what simdjson is for.

Of a body in which no object holds another it makes the whole request, in half the time of msgspec
with the packing behind it. The plain twin of `Scanner` in `_speed.pyx`; where the wheel is not
installed, or something is odd or wrong, the body is read as `json_codec.py` reads all others.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from select_service.edge.codec.writing import ECHOED, echo

try:
    from simdjson import Array, Parser
except ImportError:  # there are interpreters it has no wheel for
    Array = Parser = None  # type: ignore[assignment, misc]

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import TypeAlias

    from numpy.typing import NDArray

    _Sign: TypeAlias = Literal["i", "u"]

__all__ = ["PlainScanner"]

D = TypeVar("D")

IS_USABLE: Final = Parser is not None and sys.byteorder == "little"
"""Buffers are in the order of the machine, packed numbers little-endian."""

SCANNED_BYTES_MAX: Final = 1 << 20
"""Of a body: the parser keeps 14 times as much memory as the longest it has read."""

_PLANS_MAX: Final = 256
"""Clients have a few; who sends members in every order must not fill the memory."""

_BACKSLASH: Final = ord("\\")
_U32_MAX: Final = (1 << 32) - 1
_REFUSALS: Final = (ValueError, TypeError, AttributeError, RuntimeError, MemoryError)
"""Of the parser: no such JSON; no such numbers; no array; another thread is at it; too much."""


class _Plan(NamedTuple):
    """How the members of a body are read, by their names in its order."""

    longs: tuple[tuple[str, bool], ...]  # arrays of numbers, and whether of hashes
    simple: tuple[tuple[str, type], ...]  # of which nothing is asked but their type
    others: tuple[str, ...]
    parts: int  # strings, objects and arrays, without what may be inside of others
    shown: bool  # whether an answer may have some of it


class PlainScanner(Generic[D]):
    """Makes requests of one type."""

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
            decoded: makes what is handed on of a request, no warning and no unknown members.
            longs: members that are packed, and whether they hold hashes or tokens.
            wholes: members of which nothing is asked but that they are numbers of 64 bits.
            echoes: whether answers have the sequence hashes again.
        """
        assert IS_USABLE
        self._kind = kind
        self._decoded = decoded
        self._longs = longs
        self._echoes = echoes
        self._simple: dict[str, type] = dict.fromkeys(_texts_of(kind), str)
        self._simple.update(dict.fromkeys(wholes, int))
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._signs: tuple[_Sign, _Sign] = "i", "u"  # as hashes were last: signed, or not
        self._parse = Parser(SCANNED_BYTES_MAX).parse

    def scan(  # noqa: C901, PLR0912 - straight on: all pay for it
        self, body: bytes, small_bytes: int = 0
    ) -> D | None:
        """Return the request of a body, None when that is unusual or wrong.

        Args:
            body: as it came.
            small_bytes: if it is longer, what it holds may have to be counted.
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
            if find(b"[", at) >= 0:  # an array in one, of which buffers have the numbers, too
                return None
            request = self._convert(members) if others else self._kind(**members)
        except _REFUSALS:
            return None
        # without others it is sure that no other array stands before one of numbers
        if shown and self._echoes and signs is before and signs[0] == "i" and not others:
            echo.note_signed(body, echoed_at, members[ECHOED])
        return self._decoded(request, None, b"")

    def _plan(self, names: tuple[str, ...]) -> _Plan:
        """Return how to read a body with these members.

        Raises:
            ValueError: nobody knows one of them, or one is there twice.
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
        """Make the request of members that are more than texts and numbers."""
        rest = {name: value for name, value in members.items() if name not in self._longs}
        request = msgspec.convert(rest, self._kind)
        for name in members.keys() - rest.keys():
            setattr(request, name, members[name])
        return request


def _as_tokens(buffer: Any) -> bytes:
    """Return numbers of 64 bits as tokens.

    Raises:
        ValueError: there is one that is none.
    """
    numbers: NDArray[np.uint64] = np.frombuffer(buffer, dtype=np.uint64)  # negative is large
    if len(numbers) and numbers.max() > _U32_MAX:
        raise ValueError("no token")
    return numbers.astype(np.uint32).tobytes()


def _texts_of(kind: type[msgspec.Struct]) -> list[str]:
    """Return the members of which nothing is asked but that they are texts."""
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
_TEXT_OR_NOT: Final = (_TEXT, msgspec.inspect.NoneType())  # UNSET is no type of its own there
