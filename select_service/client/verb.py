"""Methods that are written once, for asyncio and for threads.

A method decorated with `@Verb` returns a run (`core/exchange.py`). On a `Client` it is a call that
carries out the run, on an `AsyncClient` a coroutine that does; `@BookingVerb` is for those that
`async with` may enter. `verbs.py` and `operations.py` have the methods, the faces carry them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from select_service.client.reservation import ReservationHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from select_service.client.asynchronous import AsyncClient
    from select_service.client.core.exchange import Run
    from select_service.client.reserve_context import AsyncReserve
    from select_service.client.synchronous import Client

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=ReservationHandle)


class Verb(Generic[P, T]):
    """Decorates a method that returns a run; see above."""

    def __init__(self, method: Callable[Concatenate[Any, P], Run[T]]) -> None:
        self._method = method

    @overload
    def __get__(self, client: None, face: type) -> Callable[Concatenate[Any, P], Run[T]]: ...
    @overload
    def __get__(self, client: AsyncClient, face: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: Client, face: type) -> Callable[P, T]: ...
    def __get__(self, client: AsyncClient | Client | None, face: type) -> Callable[..., Any]:
        return self._method if client is None else client.verb(self._method)


class BookingVerb(Generic[P, R]):
    """Decorates a method whose run returns a reservation."""

    def __init__(self, method: Callable[Concatenate[Any, P], Run[R]]) -> None:
        self._method = method

    @overload
    def __get__(self, client: None, face: type) -> Callable[Concatenate[Any, P], Run[R]]: ...
    @overload
    def __get__(self, client: AsyncClient, face: type) -> Callable[P, AsyncReserve[R]]: ...
    @overload
    def __get__(self, client: Client, face: type) -> Callable[P, R]: ...
    def __get__(self, client: AsyncClient | Client | None, face: type) -> Callable[..., Any]:
        return self._method if client is None else client.booking_verb(self._method)
