"""GET /openapi.json as text: made in steps once the port is open, and faster for who asks before.

`openapi.py` makes it, which takes 30 ms that no request should wait for; it is not even loaded
before (see `late.py`, which takes the steps).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from select_service.edge.slices import Slices

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Document"]


class Document:
    """The document of a service that refuses for load with this status."""

    _made: ClassVar[dict[int, bytes]] = {}  # those of one process differ in nothing else

    def __init__(self, overload_status: int) -> None:
        self._overload_status = overload_status
        self._steps: Iterator[None] | None = None

    def steps(self) -> Iterator[None]:
        """Make it; others may have their turn between two steps of milliseconds. Idempotent.

        Raises:
            OSError: its modules cannot be read now, for want of descriptors.
        """
        while self._overload_status not in self._made:
            if self._steps is None:
                self._steps = self._make()
            try:
                next(self._steps, None)
            except BaseException:  # what is broken off goes on no more: the next begins anew
                self._steps = None
                raise
            yield

    async def text(self) -> bytes:
        """Return it, made by now; who asks before takes the steps that are left, in slices.

        Raises:
            OSError: as `steps`.
        """
        slices = Slices()
        for _ in self.steps():
            await slices.breathe()
        self._steps = None
        return self._made[self._overload_status]

    def _make(self) -> Iterator[None]:
        from select_service.edge.http.openapi import describing  # see `late`

        self._made[self._overload_status] = yield from describing(self._overload_status)
