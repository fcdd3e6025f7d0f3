"""Decodes the same requests as `json_codec.py`, from MessagePack.

The types are derived from those for JSON, except that a long list of numbers may be a binary, with
the numbers packed little-endian as the core wants them. What the typed decoder omits (duplicate and
unknown members, invalid text, values JSON does not have) is checked on the maps themselves: msgspec
splits them without decoding their values.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar, cast

import msgspec
from msgspec import Raw, inspect

from indexer.core.packing import TOKEN_BYTES
from indexer.types import HASH_BYTES
from select_service.edge.codec.body_limits import BodyGuard
from select_service.edge.codec.formats import Format
from select_service.edge.codec.json_codec import (
    HASHES,
    MEDIA_TOKENS,
    TOKENS,
    Decoded,
    check_values,
    judge_unknown,
    pack,
    pack_media,
    put_media,
    refusal_of,
)
from select_service.edge.codec.member_names import DuplicateMemberError
from select_service.errors import InvalidField, InvalidMsgpack
from select_service.types import U32, AnyHash, MmRoutingInfo, PromptFields, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeAlias

    from select_service.settings import FieldValidation

    Shape: TypeAlias = "_MapOf | _ListOf | _Loose | None"

T = TypeVar("T", bound=msgspec.Struct)

_WIDTHS: Final = {TOKENS: (TOKEN_BYTES, "tokens")} | dict.fromkeys(HASHES, (HASH_BYTES, "hashes"))
_PACKED_MEDIA: Final = msgspec.defstruct(
    MmRoutingInfo.__name__, [("routing_token_ids", bytes | list[U32])], bases=(MmRoutingInfo,)
)
_PACKED_TYPES: Final = (
    {TOKENS: bytes | list[Token] | None}
    | dict.fromkeys(HASHES, bytes | list[AnyHash] | None)
    | {"mm_routing_info": _PACKED_MEDIA | None}
)
_members_of: Final = msgspec.msgpack.Decoder(dict[str, Raw]).decode
_items_of: Final = msgspec.msgpack.Decoder(list[Raw]).decode
_decode_any: Final = msgspec.msgpack.Decoder().decode
_FIXMAP: Final = 0x80  # up to 15 members; more than any type has need other headers
_NIL: Final = 0xC0
_MAP_16: Final = 0xDE
_MAP_32: Final = 0xDF
_ARRAY_32: Final = b"\xdd"
_ARRAY_HEADS: Final = {b"\xdc": 3, _ARRAY_32: 5}  # header bytes, item count included
_ONE_PIECE: Final = frozenset((0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB))  # binaries and long texts


class MsgpackDecoder(Generic[T]):
    """Decodes one type of request. Thread-safe; create one per route and keep it."""

    nothing: Final = b"\x80"

    __slots__ = ("_guard", "_kind", "_tools", "_validation")

    def __init__(
        self, kind: type[T], validation: FieldValidation, guard: BodyGuard | None = None
    ) -> None:
        self._kind = kind
        self._guard = guard or BodyGuard()
        self._validation = validation
        self._tools: _Tools[T] | None = None  # created with the first request: half a millisecond

    def decode(self, body: bytes) -> Decoded[T]:
        """Decode and check one body; at most linear in its length, nearly constant if it is packed.

        Raises:
            InvalidJson: it is not MessagePack.
            InvalidField: it has the wrong shape; `field` is the path of the culprit.
            UnknownField: it has an unknown member, under `FieldValidation.STRICT`.
        """
        tools = self._tools
        if tools is None:
            tools = self._tools = _tools_for(self._kind)
        try:
            guard = self._guard
            if len(body) > guard.small_bytes:
                _refuse_bulk(self._kind, body, tools.shape, guard)
            request = tools.decode(body)
            check_values(request)
            _check_head(body, guard)
            members = _members_of(body)
            plain = len(members) == body[0] ^ _FIXMAP and tools.flat.issuperset(members)
            unknown = (
                []
                if plain
                else _look_into(_unique_members(body, "", guard), tools.shape, "", guard)
            )
        except DuplicateMemberError as error:
            raise InvalidField(str(error), field=error.path) from None
        except TypeError as error:  # of unhashable keys, since msgspec 0.21.0
            raise InvalidMsgpack(f"not msgpack: {error}") from None
        except (ValueError, RecursionError) as error:
            raise refusal_of(error, Format.MSGPACK) from None
        warning = judge_unknown(unknown, self._validation) if unknown else None
        if tools.has_lists:
            _pack_unless_packed(cast("PromptFields", request), members)
            request.__class__ = self._kind  # same layout; shortcuts test for the exact type
        return Decoded(request, warning, _canonical(members, unknown) if unknown else b"")


def _refuse_bulk(kind: type[msgspec.Struct], body: bytes, shape: _MapOf, guard: BodyGuard) -> None:
    """Refuse a body that announces too much, before objects are made of it."""
    guard.refuse_long(kind, body)
    _check_head(body, guard)
    for name, value in _members_of(body).items():
        view = memoryview(value)
        inner = shape.members.get(name, shape.others)
        if isinstance(inner, _Unknown):
            _refuse_loose(view, name, guard)
        elif bytes(view[:1]) in _ARRAY_HEADS:
            items = int.from_bytes(view[1 : _ARRAY_HEADS[bytes(view[:1])]])
            guard.refuse_many_numbers(items, name)
            if inner is not None:
                guard.refuse_media(len(view), name)
        elif view[0] in {_MAP_16, _MAP_32}:
            guard.refuse_many_parts(_map_head(view)[0], "members", name)


@cache
def _tools_for(kind: type[T]) -> _Tools[T]:
    shape = _shape_of(inspect.type_info(kind))
    assert isinstance(shape, _MapOf)
    flat = frozenset(name for name, inner in shape.members.items() if inner is None)
    decode = msgspec.msgpack.Decoder(_packed_kind(kind)).decode
    return _Tools(decode, shape, flat, issubclass(kind, PromptFields))


def _packed_kind(kind: type[T]) -> type[T]:
    """Return a type with the same name and field order whose long lists may be binaries.

    Requests are equal if they are encoded alike (`fingerprint_of`): hence name and order.
    """
    if not issubclass(kind, PromptFields):
        return kind
    fields: list[tuple[str, Any, None]] = [
        (name, allowed, None) for name, allowed in _PACKED_TYPES.items()
    ]
    packed = msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True)
    return cast("type[T]", packed)


def _pack_unless_packed(request: PromptFields, members: Mapping[str, Raw]) -> None:
    has_lists = False
    for name in _WIDTHS:
        if name in members:
            value = getattr(request, name)
            if isinstance(value, bytes):
                _check_whole(value, name, *_WIDTHS[name])
            else:
                has_lists = True
    media: Any = request.mm_routing_info
    if media is not None and isinstance(media.routing_token_ids, bytes):
        _check_whole(media.routing_token_ids, MEDIA_TOKENS, *_WIDTHS[TOKENS])
        put_media(request, media.routing_token_ids)  # of the plain type, as from JSON
    if has_lists:
        pack(request)
    else:
        pack_media(request)


def _check_whole(packed: bytes, name: str, width: int, nouns: str) -> None:
    if len(packed) % width:
        text = f"{name}: {len(packed)} bytes are no whole number of {nouns} of {width}"
        raise InvalidField(text, field=name)


def _canonical(members: Mapping[str, Raw], unknown: list[str]) -> bytes:
    """Encode the unknown members so that equal values give equal bytes, the same as from JSON.

    What JSON cannot express (extensions, keys that are not text) is taken verbatim.
    """
    values = {name: _decode_any(members[name]) for name in unknown}
    try:
        return msgspec.json.encode(values, order="deterministic")
    except (TypeError, ValueError, RecursionError):
        raws = {name: bytes(members[name]) for name in unknown}
        return msgspec.json.encode(raws, order="deterministic")


class _Tools(NamedTuple, Generic[T]):
    """What decoding one type of request needs."""

    decode: Callable[[bytes], T]
    shape: _MapOf
    flat: frozenset[str]  # members that need not be examined
    has_lists: bool


# -- member names ------------------------------------------------------------------------------


class _MapOf(NamedTuple):
    """An object that is read, and the shapes of its members."""

    members: Mapping[str, Shape]
    others: Shape | _Unknown  # shape of all other members


class _ListOf(NamedTuple):
    """An array whose elements have to be examined."""

    items: Shape


class _Loose(Enum):
    """A float or untyped value: MessagePack can express more there than JSON."""

    LOOSE = 0


class _Unknown(Enum):
    """The value of an unknown member."""

    UNKNOWN = 0


_LOOSE: Final = _Loose.LOOSE
_UNKNOWN: Final = _Unknown.UNKNOWN


def _look_into(members: Mapping[str, Raw], shape: _MapOf, path: str, guard: BodyGuard) -> list[str]:
    """Refuse duplicates at any depth that is read; return the unknown names.

    Recursion follows the types, so it is no deeper than they are. Values of unknown names must be
    decodable all the same.
    """
    unknown = []
    for name, value in members.items():
        inner = shape.members.get(name, shape.others)
        if isinstance(inner, _Unknown):
            _loose(value, f"{path}.{name}".removeprefix("."), guard)
            unknown.append(name)
        elif inner is not None:
            _look_at(value, inner, f"{path}.{name}".removeprefix("."), guard)
    return unknown


def _look_at(value: Raw, shape: Shape, path: str, guard: BodyGuard) -> None:
    if memoryview(value)[0] == _NIL:
        return
    if isinstance(shape, _MapOf):
        _look_into(_unique_members(value, path, guard), shape, path, guard)
    elif isinstance(shape, _ListOf):
        items = _items_of(value)
        guard.refuse_many_parts(len(items), "items", path)
        for index, item in enumerate(items):
            _look_at(item, shape.items, f"{path}[{index}]", guard)
    elif shape is _LOOSE and not _is_in_json(_loose(value, path, guard)):
        raise InvalidField(f"{path}: not a value that JSON has", field=path)


def _loose(value: Raw, path: str, guard: BodyGuard) -> object:
    """Decode an untyped value, if it is not too long."""
    _refuse_loose(memoryview(value), path, guard)
    return _decode_any(value)


def _refuse_loose(view: memoryview, path: str, guard: BodyGuard) -> None:
    if view[0] not in _ONE_PIECE:
        guard.refuse_unknown(len(view), path or None)


def _is_in_json(value: object) -> bool:
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_in_json(one) for key, one in value.items())
    if isinstance(value, list):
        return all(map(_is_in_json, value))
    return value is None or isinstance(value, str | int)


def _unique_members(text: bytes | Raw, path: str, guard: BodyGuard) -> dict[str, Raw]:
    announced, head_bytes = _check_head(text, guard)
    members = _members_of(text)
    view = memoryview(text)
    if len(members) == announced:
        return members
    # Reread as an array of twice the length, which retains duplicates.
    flat = _items_of(_ARRAY_32 + (2 * announced).to_bytes(4) + view[head_bytes:])
    seen: set[str] = set()
    for raw in flat[::2]:
        name = _decode_any(raw)
        if name in seen:
            raise DuplicateMemberError(f"{path}.{name}".removeprefix("."))
        seen.add(name)
    raise AssertionError("fewer members than announced, and none of them twice")


def _check_head(text: bytes | Raw, guard: BodyGuard) -> tuple[int, int]:
    """Return the header of a map, unless it has too many members."""
    head = _map_head(memoryview(text))
    guard.refuse_many_parts(head[0], "members in one object", None)
    return head


def _map_head(view: memoryview) -> tuple[int, int]:
    """Return the number of members of a map, and the length of its header."""
    first = view[0]
    if first == _MAP_16:
        return int.from_bytes(view[1:3]), 3
    if first == _MAP_32:
        return int.from_bytes(view[1:5]), 5
    return first & 0x0F, 1


def _shape_of(node: inspect.Type) -> Shape:
    """Return what has to be examined below a type; None: nothing."""
    if isinstance(node, inspect.StructType):
        members = {field.encode_name: _shape_of(field.type) for field in node.fields}
        if node.tag_field is not None:
            members[node.tag_field] = None
        return _MapOf(members, _UNKNOWN)
    if isinstance(node, inspect.DictType):
        return _MapOf({}, _shape_of(node.value_type))
    if isinstance(node, inspect.FloatType | inspect.AnyType):
        return _LOOSE
    if isinstance(node, inspect.ListType):
        items = _shape_of(node.item_type)
        return None if items is None else _ListOf(items)
    if isinstance(node, inspect.UnionType):
        return _shape_of_any([shape for shape in map(_shape_of, node.types) if shape is not None])
    return None


def _shape_of_any(shapes: list[_MapOf | _ListOf | _Loose]) -> Shape:
    """Join the shapes of a union: one of several objects, distinguished by a tag."""
    if len(shapes) < 2:  # noqa: PLR2004 - nothing to join
        return shapes[0] if shapes else None
    members: dict[str, Shape] = {}
    for shape in shapes:
        assert isinstance(shape, _MapOf), "an object and something else in one union"
        assert shape.others is _UNKNOWN
        members |= shape.members
    return _MapOf(members, _UNKNOWN)
