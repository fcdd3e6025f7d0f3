"""GET /openapi.json as text: built in steps once the port is open, or sooner if requested.

`openapi.py` builds it, which takes 30 ms that no request should wait for; the module is not even
loaded before (see `lazy_imports.py`, which takes the steps).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from select_service.edge.cooperative import TimeSlices

if TYPE_CHECKING:
    from collections.abc import Iterator


class OpenApiDocument:
    """The document of a service whose refusals for load have this status."""

    _made: ClassVar[dict[int, bytes]] = {}  # shared: documents differ only in the status

    def __init__(self, overload_status: int) -> None:
        self._overload_status = overload_status
        self._steps: Iterator[None] | None = None

    def steps(self) -> Iterator[None]:
        """Build it in steps of milliseconds, with room for others in between. Idempotent.

        Raises:
            OSError: its modules cannot be read now, for lack of descriptors.
        """
        while self._overload_status not in self._made:
            if self._steps is None:
                self._steps = self._make()
            try:
                next(self._steps, None)
            except BaseException:  # a broken generator cannot resume: start over next time
                self._steps = None
                raise
            yield

    async def text(self) -> bytes:
        """Return the document; if it is not complete yet, take the remaining steps in slices.

        Raises:
            OSError: as `steps`.
        """
        slices = TimeSlices()
        for _ in self.steps():
            await slices.yield_if_due()
        self._steps = None
        return self._made[self._overload_status]

    def _make(self) -> Iterator[None]:
        from select_service.edge.http.openapi import describing  # see `lazy_imports.py`

        self._made[self._overload_status] = yield from describing(self._overload_status)
