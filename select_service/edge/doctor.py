"""Examines the fleet every few seconds, in slices between requests, and logs what changed.

The checks are in `core/doctor`; this file has the clock, the pauses and the log. `driver.py`
creates the doctor on first use, so a start pays nothing for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from msgspec import UNSET
from msgspec.structs import asdict

from select_service.core.diagnostics.examiner import Examiner
from select_service.core.diagnostics.prompt_sample import PromptSampler
from select_service.edge.cooperative import TimeSlices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from indexer.core.stream import EventStream
    from indexer.types import LinkState
    from select_service.core.diagnostics.parity import Suspect
    from select_service.core.diagnostics.suspicions import FindingChange
    from select_service.core.service import SelectionCore
    from select_service.types.doctor import DoctorLimits, PeerLink, Report, SourceLink

_log = logging.getLogger("select_service")

FRESH_S: Final = 2.0
"""A report may show findings of this age; older ones are examined again."""

APART_S: Final = 0.1
"""Between two examinations that are asked for: asking all the time costs no more."""

LOGGED_MAX: Final = 20
"""Findings logged one by one per examination; the rest are only counted."""

_LEVELS: Final = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO}


class Doctor:
    """One examiner, run on a timer and on request.

    Attributes:
        faults: examinations that raised, which is a bug.
    """

    def __init__(
        self,
        core: SelectionCore,
        limits: DoctorLimits,
        *,
        link_of: Callable[[EventStream], LinkState | None],
        peers: Callable[[], Sequence[PeerLink]],
        sources: Callable[[], Sequence[SourceLink]],
        canaries: Callable[[], Sequence[Suspect]] = tuple,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,  # noqa: TID251 - engines stamp events with it
    ) -> None:
        """Remember where to look; the first examination runs later.

        Args:
            core: the state of the process.
            limits: how often and how closely to examine.
            link_of: the state of a stream's connection; None: it is not listened to yet.
            peers: the replicas this process listens to.
            sources: of discovery.
            canaries: what canary prompts have found.
            clock: monotonic seconds.
            wall_clock: seconds since 1970.
        """
        self._core = core
        self._limits = limits
        self._link_of = link_of
        self._peers = peers
        self._sources = sources
        self._canaries = canaries
        self._clock = clock
        self._wall_clock = wall_clock
        self._machine_clock = time.monotonic  # never `clock`: reveals steps of the wall clock
        self._turn = asyncio.Lock()
        self._examined_at = float("-inf")
        self.faults = 0
        sampler = core.selection.sampler = PromptSampler(core.shares)
        self.examiner = Examiner(
            catalog=core.catalog,
            membership=core.membership,
            reader=core.reader,
            sampler=sampler,
            counters=core.counters,
            replica_counters=core.replicas.counters,
            reports=core.admission_controller.reports,
            replica_timeout_s=core.limits.replica_timeout_s,
            limits=limits,
            now=clock(),
            shares=core.shares,
        )

    async def watch(self) -> None:
        """Examine forever."""
        while True:
            try:
                await self.examine()
            except Exception:  # noqa: BLE001 - a bug must not end all examinations
                self.faults += 1
                _log.exception("an examination failed")
            await asyncio.sleep(self._limits.interval_s)

    async def report(self, *, examines: bool = False) -> Report:
        """Return findings at most `FRESH_S` old; concurrent callers share one examination.

        Args:
            examines: whether to examine the fleet as it is now, in any case.
        """
        since = self._clock() - (0.0 if examines else FRESH_S)
        async with self._turn:
            if self._examined_at <= since:
                await asyncio.sleep(max(0.0, self._examined_at + APART_S - self._clock()))
                await self._examine()
        return self.examiner.report(self._clock())

    async def examine(self) -> None:
        """Examine everything once."""
        async with self._turn:
            await self._examine()

    async def _examine(self) -> None:
        began_at, slices = self._clock(), TimeSlices()
        for _ in self._round():
            await slices.yield_if_due()
        self._examined_at = began_at
        _log_changes(self.examiner.changes)

    def _round(self) -> Iterator[None]:
        now, wall_now = self._clock(), self._wall_clock()
        return self.examiner.round(
            now,
            wall_now,
            wall_ahead=wall_now - self._machine_clock(),
            link_of=self._link_of,
            peers=self._peers(),
            replicas=self._core.replica_operations.status(now),
            sources=self._sources(),
            canaries=self._canaries(),
        )


def _log_changes(changes: list[FindingChange]) -> None:
    """Log each finding once when it appears and once when it is over."""
    for change in changes[:LOGGED_MAX]:
        facts: dict[str, object] = {"code": change.code}
        facts |= {k: v for k, v in asdict(change.subject).items() if v is not UNSET}
        if change.is_there:
            _log.log(_LEVELS[change.severity], "doctor: %s", change.what, extra=facts)
        else:
            _log.info("doctor: %s is over", change.code, extra=facts)
    if len(changes) > LOGGED_MAX:
        _log.warning("doctor: %d more findings came or went", len(changes) - LOGGED_MAX)
