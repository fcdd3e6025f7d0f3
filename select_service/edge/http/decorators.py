"""How a handler says which operation it carries out: `@get("/loads", list[ScopeLoads], …)`.

Everything else about an operation follows from that line: its route, its decoder, its place in
/openapi.json and in the references, the access matrix. `routes.py` collects them. Operations that
are not of the whole process go through the tenants' view, `tenancy/tenant_view.py`, which refuses
what it does not know; `embedded.py` and the clients have a method of the same name.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from select_service.edge.routing import Route

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from select_service.edge.http.api import Handler

__all__ = ["delete", "get", "operation", "patch", "post", "put", "safe_post"]


def operation(
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
) -> Callable[[Handler], Route[Handler]]:
    """Make a route of the handler below; its name is the operation's, its first line the summary.

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

    def route(handler: Handler) -> Route[Handler]:
        return Route(
            method,
            pattern,
            handler,
            takes,
            answers,
            status,
            refusals,
            query,
            summary=(handler.__doc__ or "").partition("\n")[0],
            name=handler.__name__,
            changes=method != "GET" if changes is None else changes,
            body_optional=body_optional,
            status_again=status_again,
            scope=scope,
            of_process=of_process,
            body_lenient=body_lenient,
        )

    return route


get: Final = partial(operation, "GET")
post: Final = partial(operation, "POST")
put: Final = partial(operation, "PUT")
patch: Final = partial(operation, "PATCH")
delete: Final = partial(operation, "DELETE")
safe_post: Final = partial(operation, "POST", changes=False)
"""A POST that changes nothing, because a question has a body."""
