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
    """The document of a service; see `openapi.describing`."""

    _made: ClassVar[dict[tuple[int, bool], bytes]] = {}  # shared, by all that documents differ in

    def __init__(self, overload_status: int, *, with_tokens: bool) -> None:
        self._key = (overload_status, with_tokens)
        self._steps: Iterator[None] | None = None

    def steps(self) -> Iterator[None]:
        """Build it in steps of milliseconds, with room for others in between. Idempotent.

        Raises:
            OSError: its modules cannot be read now, for lack of descriptors.
        """
        while self._key not in self._made:
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
        return self._made[self._key]

    def _make(self) -> Iterator[None]:
        from select_service.edge.http.openapi import describing  # see `lazy_imports.py`

        overload_status, with_tokens = self._key
        self._made[self._key] = yield from describing(overload_status, with_tokens=with_tokens)
