"""Keeps a core's state on disk: brings it back at the start, and stands between a verb and its yes.

Under `strict` nothing is acknowledged before it is on disk. When the disk refuses, verbs that
change something are refused before they begin; of those caught under way, a booking is released
again (nobody was told that it exists), and anything else may or may not have happened: repeating
it is safe, and tells. Reads go on. `journal.py` writes; `driver.py` makes one of these and calls.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Final

import msgspec

from select_service.edge.state.journal import Journal
from select_service.edge.state.store import Identity
from select_service.errors import StateDirUnusable
from select_service.types import StateStatus

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from select_service.core.changes import Changes, StateKey
    from select_service.core.effects import Effects
    from select_service.core.state import State
    from select_service.edge.state.store import Row
    from select_service.types import StateLimits

__all__ = ["Keeper"]

_log = logging.getLogger("select_service.state")

RESTORE_SLICE_S: Final = 0.0003
PROGRESS_EVERY_S: Final = 1.0

NAMED: Final = 4
NAMED_CHARS: Final = 256
"""Records that are named where some are told of, and how much is said of one."""

EPOCHS_SINCE: Final = 1_767_225_600  # 2026-01-01
EPOCH_S: Final = 60
EPOCH_BY_CLOCK_MAX: Final = 1 << 23
"""Epochs follow the clock, a minute each, for sixteen years; whatever the clock, they ascend."""


def next_epoch(last: int, wall: float) -> int:
    """Number a life so that no life before it had the same, even one this directory forgot.

    Who hears us takes a lower number for an old word. A directory that was put back from a backup
    knows fewer lives than there were, so counting them would not do.
    """
    by_clock = int((wall - EPOCHS_SINCE) // EPOCH_S)
    return max(last + 1, min(by_clock, EPOCH_BY_CLOCK_MAX))


class Keeper:
    """One state directory in use by one driver."""

    def __init__(
        self,
        directory: Path,
        *,
        strict: bool = True,
        interval_s: float = 0.05,
        limits: StateLimits | None = None,
    ) -> None:
        """Take the directory and read it; what it holds goes to the core in `restore`.

        Args:
            directory: made when it is not there; for this process alone.
            strict: acknowledge what is on disk, and nothing else.
            interval_s: otherwise, the changes of so long are the most a crash may take with it.
            limits: how long the disk is waited for, and by how many.

        Raises:
            StateDirUnusable: another process has it, or it cannot be read.
        """
        self.journal = Journal(directory, strict=strict, interval_s=interval_s, limits=limits)
        loaded = self.journal.open()
        self._rows = loaded.rows
        was = loaded.identity or Identity(0, 0)
        self.router_id = was.router_id or random.SystemRandom().getrandbits(64) | 1
        self.epoch = next_epoch(was.epoch, time.time())  # noqa: TID251 - it numbers this life
        assert self.journal.store.identity is not None
        self.journal.store.identity = msgspec.structs.replace(
            self.journal.store.identity, router_id=self.router_id, epoch=self.epoch
        )
        self._state: State | None = None
        self._changes: Changes | None = None
        self._free: Callable[[str], None] = lambda _: None
        self.released = 0  # bookings the disk would not take

    async def restore(
        self, state: State, carry_out: Callable[[Effects], None], clock: Callable[[], float]
    ) -> list[StateKey]:
        """Bring everything back, a slice at a time.

        Args:
            state: of the core, which must be empty.
            carry_out: what follows from a record, such as listening to a worker.
            clock: monotonic seconds.

        Returns:
            Keys whose records have no place any more.

        Raises:
            StateDirUnusable: records mean nothing to this build. Each has the checksum it was
                written with, so another build has: to go on would be to delete them.
        """
        self._state = state
        rows = [row for row in self._rows if row.kind in state.rooms]  # others: of another build
        rows.sort(key=lambda row: state.turn(row.kind, row.value))
        self._rows = []
        dropped: list[StateKey] = []
        now = started = told = clock()
        until = now + RESTORE_SLICE_S
        for number, row in enumerate(rows):
            effects = state.restore((row.kind, row.name), row.value, now)
            if effects is None:
                dropped.append((row.kind, row.name))
            else:
                carry_out(effects)
            now = clock()
            if now < until:
                continue
            if now - told >= PROGRESS_EVERY_S:
                told = now
                _log.info("restoring state", extra={"done": number + 1, "of": len(rows)})
            await asyncio.sleep(0)
            until = clock() + RESTORE_SLICE_S
        if state.unreadable:
            raise StateDirUnusable(_why_unusable(self.journal.store.directory, state.unreadable))
        _report(rows, dropped, clock() - started, self.epoch)
        return dropped

    def start(self, changes: Changes, free: Callable[[str], None]) -> None:
        """Begin to write on the running loop.

        Args:
            changes: where the core marks what changed, after `restore`.
            free: ends a reservation that is live.
        """
        assert self._state is not None
        self._changes, self._free = changes, free
        self.journal.start(changes, self._state.record, self._release)

    async def close(self) -> None:
        """Write the rest and let go of the directory. Idempotent."""
        await self.journal.close()

    # -- around a verb -------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Refuse a verb that would change something while the disk takes nothing.

        Raises:
            ServiceError: 503, with a code of its own when it is full, and when it stands still.
        """
        self.journal.check_writable()

    def settled(self) -> asyncio.Future[None] | None:
        """Return what to await before everything done so far may be acknowledged.

        Raises:
            ServiceError: the disk refuses; bookings made since are released.
        """
        self._release_if_refused()
        return self.journal.settled()

    def _release_if_refused(self) -> None:
        if self.journal.refusal is not None:
            self._release()

    def _release(self) -> None:
        """Take back bookings that are not on disk, and those their room lets in, to the last."""
        changes = self._changes
        if changes is None:
            return
        if not self.journal.strict:
            changes.trust(self.journal.told)  # those will be written
        for name in changes.take_fresh():
            self.released += 1
            self._free(name)

    def status(self) -> StateStatus:
        """Return how it stands, for /ready."""
        damage, journal = self.journal.damage, self.journal
        return StateStatus(
            epoch=self.epoch,
            durability="strict" if journal.strict else "relaxed",
            writable=journal.refusal is None,
            pending=journal.pending,
            restored={} if self._state is None else self._state.restored,
            dropped={} if self._state is None else self._state.dropped,
            damage=damage.what,
            rows_saved=damage.rows_saved,
            rows_lost=damage.rows_lost,
        )


def _why_unusable(directory: Path, unreadable: list[str]) -> str:
    return (
        f"state directory {directory}: {len(unreadable)} records are of another build and mean "
        f"nothing to this one, the first is {unreadable[0][:NAMED_CHARS]}; nothing was changed:"
        " start the build that wrote them, or this one with another directory"
    )


def _report(rows: list[Row], dropped: list[StateKey], seconds: float, epoch: int) -> None:
    facts: dict[str, object] = {
        "rows": len(rows),
        "dropped": len(dropped),
        "seconds": round(seconds, 3),
        "epoch": epoch,
    }
    _log.info("state restored", extra=facts)
    if dropped:
        named = [" ".join(key)[:NAMED_CHARS] for key in dropped[:NAMED]]
        facts["first"] = ", ".join(named)
        _log.warning("restored without what had no place any more", extra=facts)
