"""The return value of `AsyncClient.reserve` and the like: enter it, or await it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from select_service.client.reservation import ReservationHandle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

R = TypeVar("R", bound=ReservationHandle)


class AsyncReserve(Generic[R]):
    """A booking to be made: `async with` frees it at the end; after `await` the caller must."""

    __slots__ = ("_begin", "_reservation")

    def __init__(self, begin: Callable[[], Awaitable[R]]) -> None:
        self._begin = begin
        self._reservation: R | None = None

    def __await__(self) -> Generator[Any, None, R]:
        return self._begin().__await__()

    async def __aenter__(self) -> R:
        self._reservation = await self
        return self._reservation

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if self._reservation is not None:
            self._reservation.end_block(kind)  # does not block, so it always happens
