"""Tables from plain request lines to calls, and the interpreted head of a request.

Most request lines cost `connection.py` a dict lookup, or one comparison around an id.
`edge/routing.py` finds all others.
"""

from __future__ import annotations

from re import compile as compile_pattern
from re import escape
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.edge.http.api import Api, Handler
    from select_service.edge.routing import Route
    from select_service.edge.security.authority import Grant

_PLAIN: Final = rb"[A-Za-z0-9_.~:@-]+"
"""An id in a path that needs no decoding."""
_NOTHING: Final = b"(?!)"
_SECOND: Final = 2
_VERSION: Final = len(" HTTP/1.1")


class Call(Struct, frozen=True):
    """A request whose route is known and whose body may follow."""

    route: Route[Handler]
    params: tuple[str, ...]
    query: bytes
    path: bytes


class Head(Struct, frozen=True):
    """The meaning of a request's header lines, except the length of its body."""

    api: Api  # reads and writes the client's formats
    is_readable: bool  # a body is announced, in a format we can read
    has_type: bool
    grant: Grant | None = None  # what its token allows; None: no tokens required
    is_last: bool = False  # the connection ends with its answer
    suited: set[int] = field(default_factory=set)
    """The ids of the routes that serve it, bodies of any length, as far as that has been asked; see
    `Application.suits`."""


def plain_lines(routes: Sequence[Route[Handler]]) -> dict[bytes, Call]:
    """Return the calls of all request lines without parameters and queries."""
    return {
        b"%b %b HTTP/1.1" % (route.method.encode(), path := route.pattern.encode()): Call(
            route, (), b"", path
        )
        for route in routes
        if "{" not in route.pattern
    }


class OpenLines:
    """Routes in which only the second segment is open: the calls of a reservation's life.

    Attributes:
        routes: keyed by the parts of the request line before and after that segment.
    """

    def __init__(self, routes: Sequence[Route[Handler]]) -> None:
        self.routes: dict[tuple[bytes, bytes], Route[Handler]] = {}
        for route in routes:
            before, _, rest = route.pattern.partition("{")
            behind = rest.partition("}")[2]
            if rest and "{" not in behind and before.count("/") == _SECOND:
                line = f"{route.method} {before}".encode(), f"{behind} HTTP/1.1".encode()
                self.routes[line] = route
        lines = (rb"%b(%b)%b" % (escape(one), _PLAIN, escape(two)) for one, two in self.routes)
        self._match = compile_pattern(b"|".join(lines) or _NOTHING).fullmatch
        self._by_group = dict(enumerate(self.routes.values(), 1))  # one group per route

    def find(self, line: bytes) -> Call | None:
        """Return the call of a line with one parameter, if it is an id that needs no decoding."""
        match = self._match(line)
        if match is None:
            return None
        group = match.lastindex or 0
        route = self._by_group[group]
        return Call(route, (match[group].decode(),), b"", line[len(route.method) + 1 : -_VERSION])
