"""Group commit: writes changes of the core to disk and releases the answers that wait for them.

The event loop takes marked keys from `core/changes.py`, asks the core for their records and hands
them to the one writer thread; later changes go with the next commit. If the disk refuses, the keys
return to the queue, waiting callers are refused, and the commit is retried until it succeeds: a row
is the whole state behind its key, so writing it late or twice does no harm.

In relaxed mode answers do not wait unless the disk, stalled or overloaded, is so far behind that a
crash would lose more than the agreed window. A disk that does not respond for too long counts as
refusing until it responds. `store.py` behind this knows SQLite; `keeper.py` before it decides what
a refusal means.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
import threading
from collections import deque
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Final

from select_service.core.changes import WHOLE
from select_service.edge.state.rows import Damage
from select_service.edge.state.store import Store
from select_service.errors import ServiceError, StateDiskFull, StateStalled, StateUnwritable
from select_service.types import StateLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from select_service.core.changes import Changes, StateKey
    from select_service.edge.state.rows import Loaded

_log = logging.getLogger("select_service.state")

BATCH_ROWS_MAX: Final = 128
"""Records made in one turn of the loop, some 2 µs each, and rows per commit, unless more of them
belong together."""

GATHER_FROM_S: Final = 0.002
GATHER_MAX_S: Final = 0.002
"""If the last commit took longer than the first, the next one waits a quarter of that time, at most
the second, until as many changes have arrived as lately. Otherwise callers that wait for their
answers split into two groups, each also waiting for the other's commit. On faster disks waiting
costs more than it gains."""

AGES_MAX: Final = 16
"""Resolution of the age of unwritten changes, as parts of the window. Half the window is for
gathering, so that a disk which keeps up never makes anybody wait."""

ANSWERS_PER_TURN: Final = 128
"""Answers released per turn after a commit; some 20 µs each, and thousands may be waiting."""

RETRY_S: Final = 0.25
"""How long a disk that refused is left alone."""

LAST_CHANCE: Final = 0.1
"""Extra time, as a share of the stall limit, before the disk is declared stalled: the whole process
may have been suspended, and then its writer has only just resumed, too."""

_Batch = list[tuple["StateKey", bytes | None]]


class Journal:
    """One state directory and its writer thread.

    `open` and `close` may be called without a loop; everything between belongs to one loop.
    """

    def __init__(
        self,
        directory: Path,
        *,
        strict: bool = True,
        interval_s: float = 0.05,
        limits: StateLimits | None = None,
    ) -> None:
        """Name the directory; `open` locks it.

        Args:
            directory: created if missing.
            strict: every change waits for the disk.
            interval_s: if not strict, once a change has waited this long to be written, no other
                one is acknowledged before it is, except those already on disk.
            limits: how long to wait for the disk, and how many may.
        """
        self.strict = strict
        self.limits = limits or StateLimits()
        self.acknowledged = 0  # changes up to this ordinal may have been acknowledged
        self.store = Store(directory)
        self.damage = Damage()
        self.refusal: ServiceError | None = None  # while the disk refuses
        self.commits = 0
        self.rows_written = 0
        self.failures = 0
        self.stalls = 0  # commits the disk did not finish in time
        self.turned_away = 0  # changes refused because too many answers wait
        self.window_waits = 0  # answers that waited in relaxed mode
        self.commit_seconds = 0.0
        self._window_s = interval_s
        self._gathering_s = 0.0 if strict else interval_s / 2
        self._ages: deque[tuple[int, float]] = deque()  # (last ordinal, since when), if not strict
        self._changes: Changes | None = None
        self._record: Callable[[StateKey], bytes | None] = lambda _: None
        self._on_failure: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._work: SimpleQueue[_Batch | None] = SimpleQueue()
        self._busy = False  # whether the writer has a batch
        self._answered = asyncio.Event()
        self._flying: dict[StateKey, int] = {}  # keys in the writer's batch → ordinal
        self._timer: asyncio.Handle | None = None
        self._handed_at: float | None = None  # while the writer has a batch
        self._watch: asyncio.TimerHandle | None = None  # checks the writer for a stall
        self._gathering = False  # the timer waits for more changes
        self._expected = 0  # rows that recently arrived together
        self._slowness = 0.0  # duration of the last commit in seconds
        self._written_up_to = 0  # every mark up to this ordinal is on disk
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()  # ascending ordinals

    @property
    def pending(self) -> int:
        """Rows that are not on disk yet."""
        return len(self._flying) + (0 if self._changes is None else len(self._changes.marked))

    @property
    def waiting(self) -> int:
        """Answers waiting for the disk, including those whose callers have disconnected."""
        return len(self._waiting)

    # -- lifecycle -----------------------------------------------------------------------------

    def open(self) -> Loaded:
        """Lock the directory and read it.

        Raises:
            StateDirUnusable: another process holds it, or it cannot be read.
        """
        self.store.lock()
        try:
            loaded = self.store.load()
        except BaseException:
            self.store.close()
            raise
        self.store.reserve_log()
        self.damage = loaded.damage
        for what in loaded.damage.what:
            _log.error("state directory: %s", what)
        if loaded.damage:
            facts = {"saved": self.damage.rows_saved, "lost": self.damage.rows_lost}
            _log.error("damaged state put aside, what can be read is kept", extra=facts)
        return loaded

    def start(
        self,
        changes: Changes,
        record: Callable[[StateKey], bytes | None],
        on_failure: Callable[[], None],
    ) -> None:
        """Start to write, on the running loop.

        Args:
            changes: where keys are marked.
            record: returns the record of a key; None: delete the row.
            on_failure: called when a commit has failed, before any caller learns of it.
        """
        self._changes, self._record, self._on_failure = changes, record, on_failure
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._write, name="state-writer", daemon=True)
        self._thread.start()
        self._flush_anyway()  # writes the identity of this run

    async def close(self) -> None:
        """Write what is left if the disk permits, and release the directory. Idempotent.

        A stalled disk is not waited for: its writer releases the directory once it responds.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            if self._loop is None:  # otherwise the writer closes it
                self.store.close()
            return
        while (self.pending or self._busy) and self.refusal is None:
            self._flush()
            await self._answered.wait()
        self._drop_timer()
        self._handed_at = None
        if self._watch is not None:
            self._watch.cancel()
        if self.pending:
            _log.error("the disk did not take the last changes", extra={"rows": self.pending})
        self._work.put(None)
        is_stalled = isinstance(self.refusal, StateStalled)
        await asyncio.to_thread(thread.join, 0.0 if is_stalled else self.limits.stall_s)
        if thread.is_alive():
            _log.error("the disk of the state directory stands still, it is not waited for")

    # -- called by the verbs -------------------------------------------------------------------

    def note(self) -> None:
        """Schedule a write if something has changed, at the latest after the interval."""
        changes = self._changes
        if changes is None:
            return
        if not self.strict:
            self._is_behind()
        if self._busy or not changes.marked:
            return
        if self._timer is None:
            self._schedule(self._gathering_s or self._gather_s())
        elif self._gathering and len(changes.marked) >= self._expected:
            self._drop_timer()
            self._schedule(0.0)

    def check_writable(self) -> None:
        """Refuse a change before it is made, if it cannot be written or too many are waiting.

        Raises:
            ServiceError: the disk refuses, or the maximum number of answers wait for it.
        """
        self._check_taken()
        if len(self._waiting) >= self.limits.waiting_max:
            self.turned_away += 1
            raise StateStalled(f"{len(self._waiting)} answers wait for the disk of the state")

    def settled(self) -> asyncio.Future[None] | None:
        """Return what to await before a change may be acknowledged; None: nothing.

        Everything marked so far counts: a repeat must not be answered before the first call.

        Raises:
            ServiceError: the disk refuses.
        """
        if self._changes is None or self._loop is None:
            return None
        self._check_taken()
        ordinal = self._changes.marks
        if ordinal <= self._written_up_to or not self.pending:
            return None
        if not self.strict:
            if not self._is_behind() and not self._waiting:  # else it would overtake them
                self.acknowledged = ordinal
                return None
            self.window_waits += 1
        future: asyncio.Future[None] = self._loop.create_future()  # one per caller: cancellable
        self._waiting.append((ordinal, future))
        return future

    def _check_taken(self) -> None:
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)  # a traceback would retain requests

    # -- loop side -----------------------------------------------------------------------------

    def _is_behind(self) -> bool:
        """Record the age of unwritten changes; return whether the oldest exceeds the window."""
        assert self._loop is not None
        ages, now = self._ages, self._loop.time()
        while ages and ages[0][0] <= self._written_up_to:
            ages.popleft()
        marks = 0 if self._changes is None else self._changes.marks
        if marks > (ages[-1][0] if ages else self._written_up_to):
            since = ages[-1][1] if ages else 0.0
            if ages and (len(ages) >= AGES_MAX or now - since < self._window_s / AGES_MAX):
                ages[-1] = marks, since
            else:
                ages.append((marks, now))
        return bool(ages) and now - ages[0][1] >= self._window_s

    def _gather_s(self) -> float:
        assert self._changes is not None
        if self._slowness < GATHER_FROM_S or len(self._changes.marked) >= self._expected:
            return 0.0
        self._gathering = True
        return min(self._slowness / 4, GATHER_MAX_S)

    def _schedule(self, delay_s: float) -> None:
        assert self._loop is not None
        if delay_s:
            self._timer = self._loop.call_later(delay_s, self._flush)
        else:
            self._timer = self._loop.call_soon(self._flush)  # with all other changes of this turn

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._gathering = False

    def _flush(self) -> None:
        if self._changes is not None and self._changes.marked:
            self._flush_anyway()

    def _flush_anyway(self) -> None:
        self._drop_timer()
        changes = self._changes
        if self._busy or changes is None:
            return
        self._busy = True
        self._answered.clear()
        self._fill(changes, [], [])

    def _fill(self, changes: Changes, batch: _Batch, rest: list[StateKey]) -> None:
        """Make one turn's worth of records; rows that belong together stay in one batch."""
        most = len(batch) + BATCH_ROWS_MAX
        while len(batch) < most and (rest or len(batch) < BATCH_ROWS_MAX):
            taken = changes.take(rest, self._flying)
            if taken is None:
                break
            key, ordinal = taken
            self._flying[key] = ordinal
            if key[0] != WHOLE:
                batch.append((key, self._record(key)))
        if rest:
            assert self._loop is not None
            self._loop.call_soon(self._fill, changes, batch, rest)
        else:
            assert self._loop is not None
            self._handed_at = self._loop.time()
            if self._watch is None:  # one timer for many commits
                self._watch = self._loop.call_later(self.limits.stall_s, self._look)
            self._work.put(batch)

    def _look(self) -> None:
        assert self._loop is not None
        self._watch = None
        if self._handed_at is None:
            return
        left = self._handed_at + self.limits.stall_s - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._look)
        else:
            more_s = LAST_CHANCE * self.limits.stall_s
            self._watch = self._loop.call_later(more_s, self._look_again, self._handed_at)

    def _look_again(self, handed_at: float) -> None:
        if self._handed_at == handed_at:
            self._watch = None
            self._stalled()
        else:
            self._look()

    def _stalled(self) -> None:
        """Treat a writer that does not respond as a refusal, though it may still succeed."""
        self.stalls += 1
        seconds = self.limits.stall_s
        _log.error("the disk of the state directory stands still", extra={"seconds": seconds})
        self._refuse(StateStalled(f"the state has not been written to disk for {seconds:g} s"))
        self._answered.set()  # `close` stops waiting

    def _written(self, seconds: float, error: Exception | None) -> None:
        """Handle the writer's answer."""
        self._handed_at = None
        self._busy = False
        self._answered.set()
        if error is None:
            self._succeeded(seconds)
        else:
            self._failed(error)

    def _succeeded(self, seconds: float) -> None:
        assert self._changes is not None
        self.commits += 1
        self.commit_seconds += seconds
        self.rows_written += sum(key[0] != WHOLE for key in self._flying)
        self._slowness = seconds
        self._expected = min(len(self._flying) + len(self._changes.marked), BATCH_ROWS_MAX)
        if self.refusal is not None:
            _log.info("the state is written again", extra={"pending": len(self._changes.marked)})
            self.refusal = None
        latest = max(self._flying.values(), default=0)
        first_left = next(iter(self._changes.marked.values()), latest + 1)
        self._written_up_to = max(self._written_up_to, min(latest, first_left - 1))
        if not self._changes.marked:  # the last ones may have had nothing to write
            self._written_up_to = self._changes.marks
        self._changes.durable = self._written_up_to
        for key, ordinal in self._flying.items():
            self._changes.written(key, ordinal)
        self._flying.clear()
        self._let_go()
        self.note() if self.strict else self._flush()

    def _let_go(self) -> None:
        """Release the answers that need not wait any longer, a limited number per turn."""
        caught_up = not self.strict and self.refusal is None and not self._is_behind()
        for _ in range(ANSWERS_PER_TURN):
            if not self._waiting or not (caught_up or self._waiting[0][0] <= self._written_up_to):
                return
            ordinal, future = self._waiting.popleft()
            self.acknowledged = max(self.acknowledged, ordinal)
            if not future.done():
                future.set_result(None)
        assert self._loop is not None
        self._loop.call_soon(self._let_go)

    def _failed(self, error: Exception) -> None:
        assert self._changes is not None
        self.failures += 1
        if self.refusal is None:
            _log.error("the state cannot be written: %s", error)
        for key, ordinal in sorted(self._flying.items(), key=_ordinal, reverse=True):
            if key not in self._changes.marked:  # else its newer entry suffices
                self._changes.marked[key] = ordinal
                self._changes.marked.move_to_end(key, last=False)
        self._flying.clear()
        self._refuse(_refusal_for(error))
        self._drop_timer()
        if self._thread is not None and self._loop is not None:
            self._timer = self._loop.call_later(RETRY_S, self._flush_anyway)

    def _refuse(self, error: ServiceError) -> None:
        """Refuse everyone who waits for unwritten changes, and all changes from now on."""
        error.retry_after_s = RETRY_S  # when the next attempt is made
        self.refusal = error
        self._on_failure()
        while self._waiting:
            ordinal, future = self._waiting.popleft()
            if future.done():
                continue
            if ordinal <= self._written_up_to:  # it was on disk, but not yet released
                future.set_result(None)
            else:
                future.set_exception(error)
                future.exception()  # marks it retrieved: the caller may be gone

    # -- writer side ---------------------------------------------------------------------------

    def _write(self) -> None:
        loop = self._loop
        assert loop is not None
        while (batch := self._work.get()) is not None:
            started = perf_counter()
            error = _attempt(self.store, batch)
            try:
                loop.call_soon_threadsafe(self._written, perf_counter() - started, error)
            except RuntimeError:  # the loop is closed: nobody is left to answer
                break
            if error is None:
                self.store.reserve_log()  # the file may have been reopened
        self.store.close()


def _attempt(store: Store, batch: Sequence[tuple[StateKey, bytes | None]]) -> Exception | None:
    try:
        store.commit(batch)
    except Exception as error:  # noqa: BLE001 - whatever it is, nothing may be acknowledged
        return error
    return None


def _ordinal(item: tuple[StateKey, int]) -> int:
    return item[1]


def _refusal_for(error: Exception) -> ServiceError:
    full = isinstance(error, sqlite3.Error) and (
        getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
    )
    if full or (isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}):
        return StateDiskFull()
    return StateUnwritable()
