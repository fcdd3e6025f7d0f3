"""Methods that are written once, for asyncio and for threads.

A method decorated with `@Verb` returns a run (`core/exchange.py`). On a `Client` it is a call that
carries out the run, on an `AsyncClient` a coroutine that does; `@BookingVerb` is for those that
`async with` may enter. `verbs.py` and `operations.py` have the methods.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from select_service.client.reservation import ReservationHandle
from select_service.client.reserve_context import AsyncReserve

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from select_service.client.core.exchange import Run

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=ReservationHandle)


class AwaitedClient:
    """A client whose methods are awaited."""

    @abstractmethod
    async def _drive(self, run: Run[T]) -> T:
        """Carry out a run."""

    def verb(self, method: Callable[..., Run[T]]) -> Callable[..., Coroutine[Any, Any, T]]:
        """Return a method of this client that carries out the run it returns."""

        @wraps(method)
        async def called(*args: Any, **kwargs: Any) -> T:
            return await self._drive(method(self, *args, **kwargs))

        return called

    def booking_verb(self, method: Callable[..., Run[R]]) -> Callable[..., AsyncReserve[R]]:
        """The same, for `async with` or `await`."""

        @wraps(method)
        def called(*args: Any, **kwargs: Any) -> AsyncReserve[R]:
            run = method(self, *args, **kwargs)
            return AsyncReserve(lambda: self._drive(run))

        return called


class BlockingClient:
    """A client whose methods wait for their answer."""

    @abstractmethod
    def _begin(self) -> None:
        """Begin the work behind, if that has not begun."""

    @abstractmethod
    def _drive(self, run: Run[T]) -> T:
        """Carry out a run."""

    def verb(self, method: Callable[..., Run[T]]) -> Callable[..., T]:
        """Return a method of this client that carries out the run it returns."""

        @wraps(method)
        def called(*args: Any, **kwargs: Any) -> T:
            return self._drive(method(self, *args, **kwargs))

        return called

    def booking_verb(self, method: Callable[..., Run[R]]) -> Callable[..., R]:
        """The same for one that books: its reports and renewals are sent behind."""

        @wraps(method)
        def called(*args: Any, **kwargs: Any) -> R:
            self._begin()
            return self._drive(method(self, *args, **kwargs))

        return called


class Verb(Generic[P, T]):
    """Decorates a method that returns a run; see above."""

    def __init__(self, method: Callable[Concatenate[Any, P], Run[T]]) -> None:
        self._method = method

    @overload
    def __get__(self, client: None, kind: type) -> Callable[Concatenate[Any, P], Run[T]]: ...
    @overload
    def __get__(self, client: AwaitedClient, kind: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: BlockingClient, kind: type) -> Callable[P, T]: ...
    def __get__(
        self, client: AwaitedClient | BlockingClient | None, kind: type
    ) -> Callable[..., Any]:
        return self._method if client is None else client.verb(self._method)


class BookingVerb(Generic[P, R]):
    """Decorates a method whose run returns a reservation."""

    def __init__(self, method: Callable[Concatenate[Any, P], Run[R]]) -> None:
        self._method = method

    @overload
    def __get__(self, client: None, kind: type) -> Callable[Concatenate[Any, P], Run[R]]: ...
    @overload
    def __get__(self, client: AwaitedClient, kind: type) -> Callable[P, AsyncReserve[R]]: ...
    @overload
    def __get__(self, client: BlockingClient, kind: type) -> Callable[P, R]: ...
    def __get__(
        self, client: AwaitedClient | BlockingClient | None, kind: type
    ) -> Callable[..., Any]:
        return self._method if client is None else client.booking_verb(self._method)
