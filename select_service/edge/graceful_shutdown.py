"""Graceful exit: announce it, keep serving for a while, end when it is no longer needed.

It begins with SIGTERM, or with SIGUSR1 (`leave_command.py`) if SIGTERM will follow later. From then
on /ready is 503, replicas know, and every answer closes its connection, so that clients reconnect
through their load balancer to the replicas that stay. All requests are answered until the end:
clients that do not know yet must not fail. `app.py` wires this up.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("select_service")

LOOK_S: Final = 0.1
"""How late the process may notice that it is no longer needed."""

CLOSE: Final = (b"connection", b"close")


class Host(Protocol):
    """The service that leaves."""

    def announce_leaving(self) -> None:
        """Become not ready and notify replicas."""

    @property
    def awaited(self) -> int:
        """Reservations booked here and still in flight, plus requests that wait for a worker."""


class GracefulShutdown:
    """The steps from announcement to exit. Each happens once; repeated calls change nothing."""

    def __init__(
        self,
        service: Host,
        notice_s: float,
        grace_s: float,
        close_answers: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        """Do nothing until `announce` or `begin`.

        Args:
            service: the service that leaves.
            notice_s: minimum time everything is still served, until clients know of it.
            grace_s: maximum time to wait for reservations booked here to finish.
            close_answers: makes every answer close its connection.
            end: ends the process.
        """
        self._service = service
        self._notice_s, self._grace_s = notice_s, grace_s
        self._close_answers, self._end = close_answers, end
        self._announced_at: float | None = None  # loop time
        self._going: asyncio.Task[None] | None = None

    def announce(self) -> float:
        """Give notice and serve on until `begin`; return the loop time of the notice."""
        if self._announced_at is None:
            self._announced_at = asyncio.get_running_loop().time()
            self._service.announce_leaving()
            self._close_answers()
            facts = {"notice_s": self._notice_s, "grace_s": self._grace_s}
            _log.info("leaving", extra=facts)
        return self._announced_at

    def begin(self) -> None:
        """Leave; notice and grace count from the announcement. Called on the loop."""
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
