"""Keeps a core's state on disk: restores it at the start, and gates acknowledgements on the disk.

Under `strict` nothing is acknowledged before it is on disk. While the disk refuses, verbs that
change something are refused before they begin. Of those already under way, a booking is released
again (no client has learned of it); anything else may or may not have happened, and repeating it is
safe and reports which. Reads continue. `journal.py` writes; `construction.py` creates the keeper,
`driver.py` calls it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Final

import msgspec

from select_service.edge.cooperative import TimeSlices
from select_service.edge.state.journal import Journal
from select_service.edge.state.rows import Identity
from select_service.errors import StateDirUnusable
from select_service.types import StateStatus

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from select_service.core.changes import Changes, StateKey
    from select_service.core.effects import Effects
    from select_service.core.state import State
    from select_service.edge.state.rows import Row
    from select_service.types import StateLimits

_log = logging.getLogger("select_service.state")

PROGRESS_EVERY_S: Final = 1.0

NAMED: Final = 4
NAMED_CHARS: Final = 256
"""Records listed by name in a message, and the longest name shown."""

EPOCHS_SINCE: Final = 1_767_225_600  # 2026-01-01
EPOCH_S: Final = 60
EPOCH_BY_CLOCK_MAX: Final = 1 << 23
"""Epochs follow the clock, one per minute, for sixteen years; whatever the clock, they ascend."""


def next_epoch(last: int, wall: float) -> int:
    """Number this run above all earlier ones, even those this directory has forgotten.

    Replicas take a lower number for an old message. A directory restored from a backup knows of
    fewer runs than there were, so counting them would not do.
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
        """Lock the directory and read it; `restore` passes the contents to the core.

        Args:
            directory: created if missing; for this process alone.
            strict: acknowledge only what is on disk.
            interval_s: if not strict, a crash loses at most the changes of this long.
            limits: how long to wait for the disk, and how many may.

        Raises:
            StateDirUnusable: another process holds it, or it cannot be read.
        """
        self.journal = Journal(directory, strict=strict, interval_s=interval_s, limits=limits)
        loaded = self.journal.open()
        self._rows = loaded.rows
        was = loaded.identity or Identity(0, 0)
        self.router_id = was.router_id or random.SystemRandom().getrandbits(64) | 1
        self.epoch = next_epoch(was.epoch, time.time())  # noqa: TID251 - it numbers this run
        assert self.journal.store.identity is not None
        self.journal.store.identity = msgspec.structs.replace(
            self.journal.store.identity, router_id=self.router_id, epoch=self.epoch
        )
        self._state: State | None = None
        self._changes: Changes | None = None
        self._free: Callable[[str], None] = lambda _: None
        self.released = 0  # bookings freed because the disk refused them

    async def restore(
        self, state: State, carry_out: Callable[[Effects], None], clock: Callable[[], float]
    ) -> list[StateKey]:
        """Restore everything, in slices.

        Args:
            state: of the core, which must be empty.
            carry_out: carries out the effects of a record, such as listening to a worker.
            clock: monotonic seconds.

        Returns:
            Keys of records that no longer apply.

        Raises:
            StateDirUnusable: this build cannot read some records. Their checksums are right, so
                another build wrote them, and going on would delete them.
        """
        self._state = state
        rows = [row for row in self._rows if row.kind in state.sections]  # others: of another build
        rows.sort(key=lambda row: state.turn(row.kind, row.value))
        self._rows = []
        dropped: list[StateKey] = []
        now = started = logged_at = clock()
        slices = TimeSlices()
        for number, row in enumerate(rows):
            effects = state.restore((row.kind, row.name), row.value, now)
            if effects is None:
                dropped.append((row.kind, row.name))
            else:
                carry_out(effects)
            now = clock()
            if now - logged_at >= PROGRESS_EVERY_S:
                logged_at = now
                _log.info("restoring state", extra={"done": number + 1, "of": len(rows)})
            await slices.yield_if_due()
        if state.unreadable:
            raise StateDirUnusable(_why_unusable(self.journal.store.directory, state.unreadable))
        _report(rows, dropped, clock() - started, self.epoch)
        return dropped

    def start(self, changes: Changes, free: Callable[[str], None]) -> None:
        """Start to write, on the running loop.

        Args:
            changes: where the core marks changes, after `restore`.
            free: frees a live reservation.
        """
        assert self._state is not None
        self._changes, self._free = changes, free
        self.journal.start(changes, self._state.record, self._release)

    async def close(self) -> None:
        """Write the rest and release the directory. Idempotent."""
        await self.journal.close()

    # -- around a verb -------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Refuse a verb that would change something while the disk refuses.

        Raises:
            ServiceError: 503, with codes of their own for a full and for a stalled disk.
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
        """Free bookings that are not on disk, and in turn those admitted in their place."""
        changes = self._changes
        if changes is None:
            return
        if not self.journal.strict:
            changes.trust(self.journal.acknowledged)  # acknowledged ones will be written
        for name in changes.take_fresh():
            self.released += 1
            self._free(name)

    def status(self) -> StateStatus:
        """Return the state of the disk, for /ready."""
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
