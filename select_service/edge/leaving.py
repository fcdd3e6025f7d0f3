"""How a process goes: it says so first, serves on for a while, and ends when nobody needs it.

The word is SIGTERM, or SIGUSR1 (`departure.py`) of somebody who says SIGTERM later.

From the word on /ready is 503, replicas know, and every answer closes its connection, so that
clients come back by way of whatever leads them to those who stay. All requests are answered until
the end: somebody whom the news has not reached yet shall not fail. `app.py` stands before it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("select_service")

LOOK_S: Final = 0.1
"""How late it may be noticed that nobody needs us any more."""

CLOSE: Final = (b"connection", b"close")


class Host(Protocol):
    """The service that goes."""

    def announce_leaving(self) -> None:
        """Not ready from now on; replicas are told."""

    @property
    def awaited(self) -> int:
        """What was booked here and is in flight, and requests that wait for a worker."""


class Leaving:
    """From the word to the end. Begun once; saying it again changes nothing."""

    def __init__(
        self,
        service: Host,
        notice_s: float,
        grace_s: float,
        close_answers: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        """Do nothing yet.

        Args:
            service: what goes.
            notice_s: for so long at least everything is served: news travels.
            grace_s: for so long at most, while what was booked here is in flight.
            close_answers: has every answer close its connection.
            end: ends the process.
        """
        self._service = service
        self._notice_s, self._grace_s = notice_s, grace_s
        self._close_answers, self._end = close_answers, end
        self._announced_at: float | None = None  # loop time
        self._going: asyncio.Task[None] | None = None

    def announce(self) -> float:
        """Give notice, from the loop, and serve on until `begin`; return when that was."""
        if self._announced_at is None:
            self._announced_at = asyncio.get_running_loop().time()
            self._service.announce_leaving()
            self._close_answers()
            told = {"notice_s": self._notice_s, "grace_s": self._grace_s}
            _log.info("leaving", extra=told)
        return self._announced_at

    def begin(self) -> None:
        """Go, from the loop. Notice and grace count from when it was announced."""
        if self._going is not None:
            return
        if max(self._notice_s, self._grace_s) <= 0:
            if self._announced_at is None:
                self._service.announce_leaving()
            self._end()
            return
        announced_at = self.announce()
        self._going = asyncio.get_running_loop().create_task(self._go(announced_at))

    async def _go(self, begun: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(begun + self._notice_s - loop.time())
        while loop.time() - begun < self._grace_s:
            if not self._service.awaited:
                break
            await asyncio.sleep(LOOK_S)
        awaited = self._service.awaited
        _log.info("left", extra={"seconds": round(loop.time() - begun, 1), "in_flight": awaited})
        self._end()
