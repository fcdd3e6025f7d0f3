"""Decodes JSON requests: the gate at which everything malformed is refused.

msgspec decodes and checks types and ranges; added here is what it omits: duplicate and unknown
members, u64, the path of the offending field. `edge/http/api.py` stands before it; only the typed
requests of `types` pass, with the long lists of a prompt packed. A compiled kernel may pack them
before msgspec sees the rest; whenever it is not sure, the body is decoded the plain way.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from indexer.compiled import usable
from indexer.core.packing import pack_tokens, pack_u64
from indexer.types import U64_MASK
from select_service.edge.codec.body_limits import BodyGuard
from select_service.edge.codec.encoder import ECHOED, echo
from select_service.edge.codec.formats import Format
from select_service.edge.codec.member_names import (
    DuplicateMemberError,
    flat_names,
    is_deeper,
    top_level_names,
    without_items,
)
from select_service.errors import (
    InvalidField,
    InvalidJson,
    InvalidMsgpack,
    ServiceError,
    UnknownField,
)
from select_service.settings import FieldValidation
from select_service.types import (
    MmRoutingInfo,
    PromptFields,
    SelectAndReserveRequest,
    SelectRequest,
    WorkerPatch,
    WorkerSpec,
)

if usable("select_service._speed", 9):
    from select_service._speed import Scanner as _Scanner

    Scanner: type[_Scanner] | None = _Scanner
else:
    Scanner = None

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    _Scanned: TypeAlias = tuple[bytes, list[str] | None, list[tuple[str, bytes]], bytes | None]
    _Scan: TypeAlias = Callable[[bytes], "_Scanned | None"]

T = TypeVar("T", bound=msgspec.Struct)


_DEPTH_BYTES: Final = 1 << 16  # how much of a refused body is checked for depth
_WARNING_BYTES_MAX: Final = 512  # proxies commonly refuse heads above 8 KiB
_RANK_KEY: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER_KEY: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_U32_MAX: Final = (1 << 32) - 1
HASHES: Final = ("block_hashes", ECHOED)
TOKENS: Final = "token_ids"
_MEDIA: Final = b"mm_routing_info", b"routing_token_ids"
MEDIA_TOKENS: Final = b".".join(_MEDIA).decode()
_BOUNDS: Final[Sequence[tuple[str, int, int | None]]] = (
    (TOKENS, 0, _U32_MAX),
    *((name, -(1 << 63), None) for name in HASHES),
)
_ALLOWED: Final = b"allowed_worker_ids"
"""The only member of a prompt that `check_values` examines."""
_Raw: Final = msgspec.Raw
_RAW_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Decoded(msgspec.Struct, Generic[T], frozen=True):
    """A validated request, and what was unusual about it."""

    request: T
    warning: str | None  # value of a Warning header
    unknown: bytes  # canonical JSON of the unknown members, b"" if there are none


class RequestDecoder(Generic[T]):
    """Decodes one type of request. Thread-safe; create one per route and keep it."""

    nothing: Final = b"{}"

    __slots__ = (
        "_check",
        "_decode",
        "_echoes",
        "_empty",
        "_guard",
        "_known",
        "_known_bytes",
        "_scan",
        "_type",
        "_validation",
    )

    def __init__(
        self, kind: type[T], validation: FieldValidation, guard: BodyGuard | None = None
    ) -> None:
        self._type = kind
        self._guard = guard or BodyGuard()
        self._validation = validation
        self._decode = msgspec.json.Decoder(kind).decode
        names = kind.__struct_encode_fields__
        self._known = frozenset(names)
        self._known_bytes = frozenset(name.encode() for name in names)
        self._check = _check_for(kind)
        self._echoes = issubclass(kind, SelectAndReserveRequest)
        self._scan = _scan_for(kind, self._known_bytes, echoes=self._echoes)
        self._empty: Decoded[T] | None = None
        """The result for `{}`, if that is valid and the request is immutable, so that all can share
        it."""
        if kind.__struct_config__.frozen and not _required_in(kind):
            self._empty = Decoded(self._decode(b"{}"), None, b"")

    def decode(self, body: bytes) -> Decoded[T]:  # noqa: C901, PLR0912 - one straight path, as every request pays for it
        """Decode and check one body; linear in its length.

        Raises:
            InvalidJson: it is not a JSON text.
            InvalidField: it has the wrong shape; `field` is the path of the culprit.
            UnknownField: it has an unknown member, under `FieldValidation.STRICT`.
            BodyTooLarge: it is longer than this type ever needs.
        """
        if self._empty is not None and body == b"{}":
            return self._empty
        if len(body) > self._guard.small_bytes:
            self._guard.refuse_bulk(self._type, body)
        scanned = None if self._scan is None else self._scan(body)
        if scanned is None:
            return self._decode_whole(body)
        skeleton, unknown, arrays, text = scanned
        try:
            if len(skeleton) > self._guard.small_bytes:
                self._weigh(skeleton)
            request = self._decode(skeleton)
            if not skeleton.isascii():
                _check_utf8(skeleton)
            if _ALLOWED in skeleton:
                self._check(request)
            for name, packed in arrays:
                if name == MEDIA_TOKENS:
                    put_media(request, packed)
                    continue
                setattr(request, name, packed)
                if text is not None and name == ECHOED:
                    echo.last = packed, _Raw(text)
            if request.mm_routing_info is not None:  # type: ignore[attr-defined] # see `_scan_for`
                pack_media(request)
            if unknown is None:
                return self._look_closer(skeleton, request)
            if unknown:
                return self._judged(skeleton, request, unknown)
        except (ServiceError, ValueError, RecursionError):
            return self._decode_whole(body)  # for an exact error
        return Decoded(request, None, b"")

    def _decode_whole(self, body: bytes) -> Decoded[T]:
        """Decode a body without the kernel: there is none, or something is unusual or wrong."""
        self._weigh(body)
        try:
            request = self._decode(body)
        except (ValueError, RecursionError) as error:
            raise refusal_of(error) from None
        if not body.isascii():
            _check_utf8(body)
        self._check(request)
        is_flat = self._is_flat(body)
        decoded = Decoded(request, None, b"") if is_flat else self._look_closer(body, request)
        if isinstance(request, PromptFields):
            pack(request)
            if is_flat and self._echoes:
                echo.note_in(body, request.sequence_hashes)
        return decoded

    def _is_flat(self, body: bytes) -> bool:
        """Return whether the body certainly has no inner object and only known, unique names."""
        names = flat_names(body)
        return (
            names is not None
            and self._known_bytes.issuperset(names)
            and len(frozenset(names)) == len(names)
        )

    def _weigh(self, text: bytes) -> None:
        if len(text) <= self._guard.small_bytes or _read_later(self._type):
            return
        try:
            self._guard.refuse_parts(text)
        except InvalidField:
            self._refuse_depth(text[:_DEPTH_BYTES])  # many brackets: mostly deep nesting
            raise

    def _refuse_depth(self, text: bytes) -> None:
        most = self._guard.limits.depth_max
        if is_deeper(text, most):  # possible only in untyped content
            raise InvalidJson(
                f"not JSON that can be read: more than {most} deep", limit="json_depth_max"
            )

    def _look_closer(self, body: bytes, request: T) -> Decoded[T]:
        for name in _read_later(self._type):
            body = without_items(body, getattr(request, name))
        self._guard.refuse_parts(body)
        self._refuse_depth(body)
        try:
            names = top_level_names(body, _names_of_objects(self._type))
        except DuplicateMemberError as error:
            raise InvalidField(str(error), field=error.path) from None
        return self._judged(body, request, [name for name in names if name not in self._known])

    def _judged(self, body: bytes, request: T, unknown: list[str]) -> Decoded[T]:
        if not unknown:
            return Decoded(request, None, b"")
        warning = judge_unknown(unknown, self._validation)
        as_written = self._guard.limits.unknown_bytes_max
        return Decoded(request, warning, _canonical(body, unknown, as_written))


def _required_in(kind: type[msgspec.Struct]) -> frozenset[bytes]:
    """Return the required members of a struct."""
    return frozenset(
        one.encode_name.encode() for one in msgspec.structs.fields(kind) if one.required
    )


def judge_unknown(
    unknown: list[str], validation: FieldValidation, kind: str = "field"
) -> str | None:
    """Return the Warning header for unknown names.

    Raises:
        UnknownField: under `FieldValidation.STRICT`.
    """
    if validation is FieldValidation.STRICT:
        raise UnknownField(f"unknown {kind}: {_printable(unknown)}", field=unknown[0])
    warn = validation is FieldValidation.WARN
    return f'299 - "unknown {kind}: {_printable(unknown)}"' if warn else None


def _scan_for(kind: type[msgspec.Struct], names: frozenset[bytes], *, echoes: bool) -> _Scan | None:
    """Return the scanner that takes out long arrays, if there is one and the type has some.

    Without the kernel msgspec decodes the whole body.
    """
    if Scanner is None or not issubclass(kind, PromptFields):
        return None
    shown = ECHOED.encode() if echoes else None
    return Scanner(
        names,
        {name.encode() for name in HASHES},
        {TOKENS.encode()},
        shown,
        _MEDIA,
    ).scan


def check_values(request: msgspec.Struct) -> None:
    """Check what the types cannot express.

    Raises:
        InvalidField: beyond 64 bits, or not a dp_rank.
        InvalidJson: a dp_rank key that is not a number at all.
    """
    _check_for(type(request))(request)


@functools.cache
def _check_for(kind: type[msgspec.Struct]) -> Callable[[msgspec.Struct], None]:
    """Return the check for a type; cached, so that requests do not look it up."""
    if issubclass(kind, SelectRequest):
        return _check_allowed
    return _check_ranks if issubclass(kind, WorkerSpec | WorkerPatch) else _check_nothing


def _check_nothing(_: msgspec.Struct) -> None:
    """Do nothing: the types say everything."""


def _check_allowed(request: msgspec.Struct) -> None:
    allowed = request.allowed_worker_ids  # type: ignore[attr-defined] # see `_check_for`
    if allowed:
        _check_u64("allowed_worker_ids", allowed)


def pack(request: PromptFields) -> None:
    """Pack what msgspec has read as lists.

    Raises:
        InvalidField: a number is out of range; `field` is the path of the first one.
    """
    try:
        if type(request.block_hashes) is list:
            request.block_hashes = pack_u64(request.block_hashes)
        if type(request.sequence_hashes) is list:
            request.sequence_hashes = pack_u64(request.sequence_hashes)
        if type(request.token_ids) is list:
            request.token_ids = pack_tokens(request.token_ids)
    except ValueError:
        _check_lists(request)
        raise
    pack_media(request)


def pack_media(request: Any) -> None:
    """Pack the tokens around media, if they are a list."""
    media = request.mm_routing_info
    if media is not None and type(media.routing_token_ids) is list:
        put_media(request, pack_tokens(media.routing_token_ids))


def put_media(request: Any, tokens: bytes) -> None:
    """Replace the tokens around media by packed ones."""
    media = request.mm_routing_info
    if media is not None:  # a duplicate member may be null; it is refused later
        request.mm_routing_info = MmRoutingInfo(tokens, media.block_mm_infos)  # type: ignore[arg-type]


def _check_lists(request: PromptFields) -> None:
    """Refuse the first number out of bounds, with msgspec's text."""
    for name, least, most in _BOUNDS:
        values = getattr(request, name)
        if type(values) is not list:
            continue
        for position, value in enumerate(values):
            path = f"{name}[{position}]"
            if value < least:
                raise InvalidField(f"{path}: Expected `int` >= {least}", field=path)
            if most is not None and value > most:
                raise InvalidField(f"{path}: Expected `int` <= {most}", field=path)
    for name in HASHES:
        values = getattr(request, name)
        if type(values) is list:
            _check_u64(name, values)


def _check_u64(name: str, values: Sequence[int]) -> None:
    if values and max(values) > U64_MASK:
        position = next(at for at, value in enumerate(values) if value > U64_MASK)
        path = f"{name}[{position}]"
        raise InvalidField(f"{path}: must be at most 2^64-1", field=path)


def _check_utf8(body: bytes) -> None:
    """Refuse invalid UTF-8 in unknown members, which the decoder has skipped unread."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidJson(f"not JSON: {error}") from None


def _check_ranks(request: msgspec.Struct) -> None:
    """Refuse keys of maps by rank that are not dp_ranks."""
    assert isinstance(request, WorkerSpec | WorkerPatch)
    for field in ("kv_events_endpoints", "replay_endpoints"):
        _check_keys(field, getattr(request, field) or {})


def _check_keys(field: str, endpoints: dict[str, str]) -> None:
    for key in endpoints:
        path = f"{field}.{key}"
        if not _NUMBER_KEY.fullmatch(key):
            raise InvalidJson(f"{field}: keys must be dp_ranks", field=path)
        if not _RANK_KEY.fullmatch(key) or key.startswith("-") or len(key) > len(str(_U32_MAX)):
            raise InvalidField(f"{path}: not a 32-bit dp_rank", field=path)
        if int(key) > _U32_MAX:
            raise InvalidField(f"{path}: not a 32-bit dp_rank", field=path)


# -- errors and their paths --------------------------------------------------------------------

_AT: Final = re.compile(r"(?s)(.*) - at `(?:key`? in `?)?\$\.?(.*)`")
MALFORMED: Final = {Format.JSON: InvalidJson, Format.MSGPACK: InvalidMsgpack}
_MISSING: Final = re.compile(r"Object missing required field `(.*)`")
_NAMED: Final = re.compile(r"(\w+) (?:must be |and \w+ name)")  # `__post_init__` of the types


def refusal_of(error: ValueError | RecursionError, form: Format = Format.JSON) -> ServiceError:
    """Convert msgspec's error about a body to ours, with the path of the field."""
    if isinstance(error, RecursionError):
        return MALFORMED[form](f"not {form.value} that can be read: nested too deeply")
    if not isinstance(error, msgspec.ValidationError):
        return MALFORMED[form](f"not {form.value}: {error}")
    text, path = str(error), ""
    if at := _AT.fullmatch(text):
        text, path = at.groups()
    if named := _MISSING.fullmatch(text) or _NAMED.match(text):
        path = f"{path}.{named[1]}".removeprefix(".")
    elif path:
        text = f"{path}: {text}"
    return InvalidField(text, field=path or None)


def _printable(names: list[str]) -> str:
    """Join client-chosen names so that they fit a quoted string in a header."""
    text = ", ".join(names)[:_WARNING_BYTES_MAX]
    safe = text.encode("unicode_escape").decode().replace("\\", "\\\\").replace('"', '\\"')
    if len(safe) > _WARNING_BYTES_MAX or len(text) == _WARNING_BYTES_MAX:
        safe = safe[:_WARNING_BYTES_MAX].rstrip("\\") + "..."
    return safe


def _canonical(body: bytes, unknown: list[str], most: int) -> bytes:
    """Encode the unknown members so that equal JSON values give equal bytes.

    Members longer than `most` bytes are taken verbatim: making objects of them takes long.
    """
    raw = _RAW_MEMBERS.decode(body)
    members: dict[str, object] = {}
    for name in unknown:
        if len(memoryview(raw[name])) > most:
            members[name] = raw[name]  # clients repeat a request in the same spelling
            continue
        try:
            members[name] = msgspec.json.decode(raw[name])
        except (ValueError, RecursionError) as error:
            refusal = refusal_of(error)
            inside = refusal.field or ""
            refusal.field = f"{name}{inside}" if inside[:1] in {"", "["} else f"{name}.{inside}"
            raise refusal from None
    try:
        return msgspec.json.encode(members, order="deterministic")
    except RecursionError as error:
        raise refusal_of(error) from None


@functools.cache
def _names_of_objects(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Return the names of all members, at any depth, whose values contain objects."""
    names: set[str] = set()

    def visit(node: msgspec.inspect.Type) -> bool:
        """Visit one type; return whether its JSON is an object, or an array with objects."""
        if isinstance(node, msgspec.inspect.UnionType):
            holds = [visit(one) for one in node.types]
            return any(holds)
        if isinstance(node, msgspec.inspect.ListType):
            return visit(node.item_type)
        if isinstance(node, msgspec.inspect.StructType):
            names.update(field.encode_name for field in node.fields if visit(field.type))
            return True
        return isinstance(node, msgspec.inspect.DictType)

    visit(msgspec.inspect.type_info(kind))
    return frozenset(names)


@functools.cache
def _read_later(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the names of members whose items are decoded one by one later."""
    node = msgspec.inspect.type_info(kind)
    assert isinstance(node, msgspec.inspect.StructType)
    return tuple(
        field.name
        for field in node.fields
        if isinstance(field.type, msgspec.inspect.ListType)
        and isinstance(field.type.item_type, msgspec.inspect.RawType)
    )
