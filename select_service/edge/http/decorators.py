"""How an operation is declared: `@get("/loads", list[ScopeLoads], …)` above its handler.

Where the handler would only call a method of the driver, there is none: `get(…).calls(method)`.
Everything else about an operation follows from that line: its route, its decoder, its place in
/openapi.json and in the references, the access matrix; and of a plain call the methods of an
embedded service and of the clients, too (`make twin`). `routes.py` collects them. Operations that
are not of the whole process go through the tenants' view, `tenancy/tenant_view.py`, which refuses
what it does not know.
"""

from __future__ import annotations

from functools import partial
from inspect import getdoc, iscoroutinefunction, signature
from typing import TYPE_CHECKING, Any, Final

from select_service.edge.routing import Route, read_count, read_query, read_u64

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from select_service.edge.codec.responses import Response
    from select_service.edge.http.api import Api, Handler, Request

_IN_PATH: Final[dict[str, Callable[[str], object]]] = {"int": read_u64, "str": str}
_IN_QUERY: Final[dict[str, Callable[[str, str | None, Any], object]]] = {
    "int": read_count,
    "str | None": lambda _, text, default: default if text is None else text,
}
"""How arguments are read, by their annotations; others want a handler."""


class Declaration:
    """A line of the API without what carries it out: decorates a handler, or names a method."""

    def __init__(
        self,
        method: str,
        pattern: str,
        answers: object,
        *refusals: int,
        scope: str,
        of_process: bool = False,
        takes: type[msgspec.Struct] | None = None,
        status: int = 200,
        status_again: int | None = None,
        query: tuple[str, ...] = (),
        body_optional: bool = False,
        body_lenient: bool = False,
        changes: bool | None = None,
    ) -> None:
        """Declare an operation.

        Args:
            method: of HTTP; GET answers HEAD, too.
            pattern: the path; `{x}` stands for one segment.
            answers: the type of the answer, which msgspec can describe; None: it is not JSON.
            refusals: statuses of errors, besides those of every route.
            scope: that a token needs; see `security/authority.py`.
            of_process: it concerns the whole process: not for tokens bound to tenants.
            takes: the type of the body; None: any body is ignored.
            status: of the answer.
            status_again: of the answer if nothing is new.
            query: the parameters that it knows.
            body_optional: no body is as good as `{}`.
            body_lenient: any Content-Type, and bodies that mean nothing are ignored.
            changes: it changes state that outlives the answer, which waits for the disk then; None:
                unless it is a GET.
        """
        self._row: dict[str, Any] = {
            "method": method,
            "pattern": pattern,
            "takes": takes,
            "answers": answers,
            "status": status,
            "refusals": refusals,
            "query": query,
            "changes": method != "GET" if changes is None else changes,
            "body_optional": body_optional,
            "status_again": status_again,
            "scope": scope,
            "of_process": of_process,
            "body_lenient": body_lenient,
        }

    def __call__(self, handler: Handler) -> Route[Handler]:
        """Return the route of a handler, which has the operation's name and summary."""
        return self._route(handler, handler)

    def calls(self, method: Callable[..., object]) -> Route[Handler]:
        """Return the route of an operation that is one call of a method of the driver.

        The method takes the open segments of the path in order, then the body if there is one, and
        by name what the query asks for, with its defaults; its name is the operation's, its first
        line the summary.
        """
        row, (_, *parameters) = self._row, signature(method).parameters.values()
        name, takes, status = method.__name__, row["takes"], row["status"]
        path = [_IN_PATH[one.annotation] for one in parameters[: row["pattern"].count("{")]]
        asked = {one.name: one for one in parameters if one.name in row["query"]}

        def call_of(api: Api, request: Request) -> Callable[..., Any]:
            """Return what is to be called, but for the body: a wrong path is refused before."""
            given = [read(text) for read, text in zip(path, request.params, strict=True)]
            values = read_query(request.query, row["query"]) if asked else {}
            named = {
                key: _IN_QUERY[one.annotation](key, values.get(key), one.default)
                for key, one in asked.items()
            }
            return lambda *body: getattr(api.service, name)(*given, *body, **named)

        def handle(api: Api, request: Request) -> Response:
            call = call_of(api, request)
            if takes is None:
                return api.writer.reply(call(), status)
            body = api.bodies[takes]
            decoded = body.decode(request.body or (body.nothing if row["body_optional"] else b""))
            return api.answer(decoded, lambda one, _: call(one), status)

        async def handle_later(api: Api, request: Request) -> Response:
            return api.writer.reply(await call_of(api, request)(), status)

        if not iscoroutinefunction(method):
            return self._route(handle, method)
        assert takes is None, "a body and a wait want a handler"
        return self._route(handle_later, method)

    def _route(self, handler: Handler, named: Callable[..., object]) -> Route[Handler]:
        text = getdoc(named) or ""
        return Route(
            handler=handler,
            name=named.__name__,
            summary=text.partition("\n")[0],
            description=text,
            calls=None if named is handler else named,
            **self._row,
        )


get: Final = partial(Declaration, "GET")
post: Final = partial(Declaration, "POST")
put: Final = partial(Declaration, "PUT")
patch: Final = partial(Declaration, "PATCH")
delete: Final = partial(Declaration, "DELETE")
safe_post: Final = partial(Declaration, "POST", changes=False)
"""A POST that changes nothing, because a question has a body."""
