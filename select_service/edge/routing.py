"""Maps method and raw path to a route: exact, case-sensitive, no slash folding.

It knows nothing of ASGI, so any transport can use it. The table itself is `http/routes.py`; the
rules for ids, numbers and queries in a URL are here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes

from msgspec import Struct

from indexer.types import U64_MASK
from select_service.errors import (
    InvalidField,
    InvalidPath,
    InvalidQuery,
    MethodNotAllowed,
    RouteNotFound,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

H = TypeVar("H")
Choice = TypeVar("Choice", bound=str)

OPEN: Final = "open"
"""The scope of routes that need no token."""

_SHARE: Final = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?")
_NUMBER: Final = re.compile(r"\+?0*" r"([0-9]{1,20})")  # as the reference's u64 parsers


class Route(Struct, Generic[H], frozen=True):
    """One line of the API. `{x}` in the pattern stands for one non-empty path segment."""

    method: str
    pattern: str
    handler: H
    takes: type | None = None  # JSON body; None: any body is ignored
    answers: object = None  # a type msgspec can describe; None: not JSON
    status: int = 200
    refusals: tuple[int, ...] = ()  # statuses >= 400 besides those implied by the other fields
    query: tuple[str, ...] = ()
    summary: str = ""
    description: str = ""
    name: str = ""  # of the operation
    calls: Callable[..., object] | None = None  # of the driver, if the operation is just that call
    changes: bool = False  # it changes state that outlives the answer
    body_optional: bool = False  # without a body no Content-Type either
    status_again: int | None = None  # if nothing is new
    scope: str = "admin"  # that a token needs; see `security/authority.py`
    of_process: bool = False  # concerns the whole process, not a tenant
    body_lenient: bool = False  # any Content-Type; the handler ignores meaningless bodies


class RouteMatch(NamedTuple, Generic[H]):
    """A route and the percent-decoded segments that filled its braces."""

    route: Route[H]
    params: tuple[str, ...]


class Router(Generic[H]):
    """Finds static routes by one dict lookup; those with braces by first segment and length."""

    def __init__(self, routes: Sequence[Route[H]], missing: str = "route not found") -> None:
        """Take the table.

        Args:
            routes: all of them.
            missing: the error message for any other path.
        """
        self._missing = missing
        self._static: dict[bytes, dict[str, Route[H]]] = {}
        self._shaped: dict[tuple[bytes, int], list[tuple[_Shape, dict[str, Route[H]]]]] = {}
        shapes: dict[_Shape, dict[str, Route[H]]] = {}
        for route in routes:
            if "{" not in route.pattern:
                methods = self._static.setdefault(route.pattern.encode(), {})
            else:
                shape = _shape(route.pattern)
                methods = shapes.setdefault(shape, {})
            methods[route.method] = route
            if route.method == "GET":
                methods.setdefault("HEAD", route)
        for shape, methods in shapes.items():
            self._shaped.setdefault((shape.first, shape.length), []).append((shape, methods))

    def match(self, method: str, raw_path: bytes) -> RouteMatch[H]:
        """Find the route of a request.

        Raises:
            RouteNotFound: no route has this path.
            MethodNotAllowed: one has it, but with another method.
            InvalidPath: a segment is not UTF-8.
        """
        methods, segments = self._find(method, raw_path)
        if not methods:
            raise RouteNotFound(self._missing)
        route = methods.get(method)
        if route is None:
            raise MethodNotAllowed("method not allowed")
        return RouteMatch(route, tuple(map(_decode_segment, segments)) if segments else ())

    def find(self, method: str, raw_path: bytes) -> RouteMatch[H] | None:
        """Like `match`, for callers with a fallback: None where that raises, and for HEAD."""
        methods, segments = self._find(method, raw_path)
        route = methods.get(method)
        if route is None or route.method != method:
            return None
        try:
            return RouteMatch(route, tuple([_decode_segment(one) for one in segments]))
        except InvalidPath:
            return None

    def allowed(self, raw_path: bytes) -> str:
        """Return the value of an Allow header for a path."""
        shaped, _ = self._find_shaped(raw_path)
        return ", ".join(sorted({*self._static.get(raw_path, ()), *shaped}))

    def _find(self, method: str, raw_path: bytes) -> tuple[dict[str, Route[H]], list[bytes]]:
        methods = self._static.get(raw_path)
        if methods is None:
            return self._find_shaped(raw_path)
        if method not in methods:  # DELETE /reservations/batch frees the reservation named `batch`
            shaped, segments = self._find_shaped(raw_path)
            if method in shaped:
                return shaped, segments
        return methods, []

    def _find_shaped(self, raw_path: bytes) -> tuple[dict[str, Route[H]], list[bytes]]:
        parts = raw_path.split(b"/")
        if len(parts) == 1:
            return {}, []
        for shape, shaped in self._shaped.get((parts[1], len(parts)), ()):
            for at, text in shape.fixed:
                if parts[at] != text:
                    break
            else:
                segments = [parts[at] for at in shape.open]
                return (shaped, segments) if all(segments) else ({}, [])
        return {}, []


class _Shape(NamedTuple):
    """A pattern with braces: `/workers/{id}` has the parts "", "workers" and an open one."""

    length: int
    first: bytes
    fixed: tuple[tuple[int, bytes], ...]  # after the first: (position, text)
    open: tuple[int, ...]


def _shape(pattern: str) -> _Shape:
    parts = pattern.split("/")
    is_open = [part.startswith("{") for part in parts]
    return _Shape(
        len(parts),
        parts[1].encode(),
        tuple((at, part.encode()) for at, part in enumerate(parts) if at > 1 and not is_open[at]),
        tuple(at for at, is_it in enumerate(is_open) if is_it),
    )


def _decode_segment(segment: bytes) -> str:
    if b"%" not in segment and segment.isascii():
        return segment.decode()
    try:
        return unquote_to_bytes(segment).decode()
    except UnicodeDecodeError as error:
        raise InvalidPath(f"invalid UTF-8 in the path: {error}") from None


def read_u64(segment: str) -> int:
    """Read a number in a path; `+1` and `01` are 1.

    Raises:
        InvalidPath: not a number, or beyond 64 bits.
    """
    found = _NUMBER.fullmatch(segment)
    value = int(found[1]) if found else U64_MASK + 1
    if value > U64_MASK:
        raise InvalidPath(f"cannot parse `{segment[:64]}` as an unsigned 64-bit number")
    return value


def read_count(
    name: str, text: str | None, default: int, most: int | None = None, *, least: int = 1
) -> int:
    """Read a count in a query; at least one, or `least`.

    Raises:
        InvalidQuery: not a count, or above `most`.
    """
    if text is None:
        return default
    found = _NUMBER.fullmatch(text)
    if not found or int(found[1]) < least:
        raise InvalidQuery(f"`{name}` must be a whole number above {least - 1}", field=name)
    if most is not None and int(found[1]) > most:
        raise InvalidQuery(f"`{name}` must be at most {most}", field=name)
    return int(found[1])


def read_share(name: str, text: str | None, default: float) -> float:
    """Read a number from 0 to 1 in a query, such as 0.05.

    Raises:
        InvalidQuery: not such a number.
    """
    if text is None:
        return default
    if not _SHARE.fullmatch(text) or float(text) > 1:
        raise InvalidQuery(f"`{name}` must be a number from 0 to 1", field=name)
    return float(text)


def read_id(name: str, text: str | None) -> int | None:
    """Read a u64 id in a query.

    Raises:
        InvalidQuery: not a u64.
    """
    try:
        return None if text is None else read_u64(text)
    except InvalidPath as error:
        raise InvalidQuery(str(error), field=name) from None


def read_switch(name: str, text: str | None) -> bool:
    """Read a boolean in a query; false unless given.

    Raises:
        InvalidQuery: neither `true` nor `false`.
    """
    if text not in (None, "true", "false"):
        raise InvalidQuery(f"`{name}` must be true or false", field=name)
    return text == "true"


def read_choice(name: str, text: str | None, choices: tuple[Choice, ...]) -> Choice | None:
    """Read one of a few words in a query; None: not given.

    Raises:
        InvalidQuery: another word.
    """
    if text is None:
        return None
    for choice in choices:
        if choice == text:
            return choice
    raise InvalidQuery(f"`{name}` must be one of {', '.join(choices)}", field=name)


def read_query(raw: bytes, known: tuple[str, ...]) -> dict[str, str]:
    """Read the known keys of a query string; others are skipped, bad UTF-8 becomes U+FFFD.

    Raises:
        InvalidQuery: a known key occurs twice.
    """
    values: dict[str, str] = {}
    if not raw:
        return values
    for pair in raw.split(b"&"):
        raw_key, _, raw_value = pair.partition(b"=")
        key = _decode_form(raw_key)
        if key not in known:
            continue
        if key in values:
            raise InvalidQuery(f"duplicate field `{key}`", field=key)
        values[key] = _decode_form(raw_value)
    return values


def unknown_in_query(raw: bytes, known: tuple[str, ...]) -> list[str]:
    """Return the keys of a query string that a route does not know, each once, in order."""
    keys = (_decode_form(pair.partition(b"=")[0]) for pair in raw.split(b"&") if pair)
    return list(dict.fromkeys(key for key in keys if key not in known))


def _decode_form(text: bytes) -> str:
    return unquote_to_bytes(text.replace(b"+", b" ")).decode(errors="replace")


# The query that narrows a listing to one scope: `model_name`, `tenant_id` or `routing_group`.

SCOPE_QUERY: Final = ("model_name", "tenant_id", "routing_group")


def read_scope(query: bytes) -> tuple[str | None, str | None]:
    """Return the model and the tenant in a query; None: any."""
    return scope_in(read_query(query, SCOPE_QUERY))


def scope_in(values: dict[str, str]) -> tuple[str | None, str | None]:
    """Return the model and the tenant in a parsed query; None: any.

    Raises:
        InvalidField: `tenant_id` and its synonym `routing_group` differ.
    """
    tenant, group = values.get("tenant_id"), values.get("routing_group")
    if tenant is not None and group is not None and tenant != group:
        raise InvalidField(
            "routing_group and tenant_id name the same thing and must be equal",
            field="routing_group",
        )
    return values.get("model_name"), group if tenant is None else tenant
