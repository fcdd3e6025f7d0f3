"""Schedules housekeeping: what expires, decays or is re-examined, once a second.

The core does a bounded piece of work per turn and says whether more is due.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from select_service.edge.cooperative import ended

if TYPE_CHECKING:
    from select_service.edge.driver.core_calls import CallContext

_log = logging.getLogger("select_service")

HOUSEKEEPING_S = 1.0
"""Between turns when no work is left over; also how late an expiry may be."""


class Housekeeping:
    """Runs the core's housekeeping from `start` to `close`.

    Attributes:
        faults: turns that raised, which is a bug.
    """

    def __init__(self, turn: CallContext, hurry: asyncio.Event) -> None:
        """Do nothing yet.

        Args:
            turn: of the core to run.
            hurry: set to start the next turn at once.
        """
        self._core, self._clock, self._carry_out = turn
        self._hurry = hurry
        self._task: asyncio.Task[None] | None = None
        self._has_namesake = False
        self.faults = 0

    def start(self) -> None:
        """Start, on the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._keep_house())

    async def close(self) -> None:
        """Stop. Idempotent."""
        task, self._task = self._task, None
        await ended(task)

    async def _keep_house(self) -> None:
        while True:
            more = False
            try:
                # Recomputed every turn: the wall clock may be set, for instance once NTP answers.
                self._core.trust_monitor.wall_ahead = time.time() - self._clock()  # noqa: TID251
                more, effects = self._core.tick(self._clock())
                self._carry_out(effects)
                self._complain_of_namesakes()
            except Exception:  # noqa: BLE001 - a bug must not end all expiry
                self.faults += 1
                _log.exception("housekeeping failed")
            await (asyncio.sleep(0) if more else self._rest())

    async def _rest(self) -> None:
        """Sleep until the next turn is due, or more work arrives."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOUSEKEEPING_S):
                await self._hurry.wait()
        self._hurry.clear()

    def _complain_of_namesakes(self) -> None:
        if self._core.replicas.counters.namesakes and not self._has_namesake:
            self._has_namesake = True
            _log.error(
                "another process uses our router id, so neither receives from the other: "
                "its --state-dir is a copy of ours, and one of both must start from an empty one"
            )
