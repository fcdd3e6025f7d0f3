"""What every operation of an embedded service does around its own work.

It keeps the promise of its route: what changes state is on disk when it returns, or taken back.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from select_service.edge.arguments import plain_scalars, scalars_of
from select_service.edge.http.routes import OPERATIONS
from select_service.edge.withdrawal import withdrawn_if_lost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from select_service.edge.driver.driver import Driver

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="HasDriver")


class HasDriver(Protocol):
    """An embedded service, as far as its operations see it."""

    driver: Driver


def operation(
    method: Callable[Concatenate[S, P], Awaitable[R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Let a method of the API keep the promise of its route: what changes state is kept on disk."""
    changes = OPERATIONS[method.__name__].changes
    scalars = scalars_of(method)

    @wraps(method)
    async def carry_out(service: S, /, *given: P.args, **kwargs: P.kwargs) -> R:
        args: Any = list(given)
        plain_scalars(scalars, args, kwargs)
        if not changes:
            return await method(service, *args, **kwargs)
        driver = service.driver
        if driver.keeper is not None:
            driver.keeper.check_writable()
        answer = await method(service, *args, **kwargs)
        with withdrawn_if_lost(driver, answer):
            await driver.settle()
        return answer

    return carry_out
