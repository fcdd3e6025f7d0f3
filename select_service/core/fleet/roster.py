"""Compares a source's workers with the catalog: the changes that make both agree.

A source lists all its workers every time. It owns only the records it made: an id that something
else registered first is kept, and the clash is reported. Whether a worker *may be chosen* and
whether its *state is kept* are two questions: one that is not ready, or no longer listed, takes no
new work at once and keeps its load and index. `edge/discovery` looks, the driver applies the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.core.fleet.catalog import NOT_NAMED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from select_service.core.fleet.catalog import Catalog
    from select_service.types import WorkerSpec

API: Final = "api"
"""The source of workers registered over HTTP or by embedding."""


class Unready(NamedTuple):
    """Why a listed worker takes no new work."""

    why: str
    has_ended: bool = False
    """It will never run again: its state is kept for the grace only."""


class RosterPlan(NamedTuple):
    """The changes to apply, in this order."""

    removed: list[int]
    put: list[WorkerSpec]
    conflicts: list[tuple[int, str]]  # worker_id, the source that owns it
    held_back: list[tuple[int, str | None]]  # worker_id, why it takes no new work; None: it does


_ABSENT: Final = Unready(NOT_NAMED, has_ended=True)


class Roster:
    """One source's workers over time.

    Attributes:
        missed: number of its workers that take no new work: they are not ready, leave, or are no
            longer listed.
    """

    def __init__(
        self,
        source: str,
        *,
        grace_s: float,
        engine_grace_s: float = 0.0,
        connection: Callable[[int], object] = lambda _: None,
        has_requests: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Start empty.

        Args:
            source: whose workers they are.
            grace_s: how long the state of a worker stays that is no longer listed, or has ended.
            engine_grace_s: how long, if its engine proves to be the same, or has requests to end.
            connection: identifies the unbroken connections to a worker's engine; None: there are
                none. As long as it stays the same, so does the engine.
            has_requests: whether a worker has requests in flight that it may end.
        """
        self.source = source
        self.missed = 0
        self._grace_s = grace_s
        self._engine_grace_s = engine_grace_s
        self._connection = connection
        self._has_requests = has_requests
        self._ended: dict[int, tuple[float, object]] = {}  # since when, connected how

    @property
    def is_waiting(self) -> bool:
        """Whether workers are to be removed later that are no longer listed, or have ended."""
        return bool(self._ended)

    def plan(
        self,
        named: Mapping[int, WorkerSpec],
        catalog: Catalog,
        now: float,
        unready: Mapping[int, Unready] | None = None,
    ) -> RosterPlan:
        """Compare; O(workers).

        `named` workers may be chosen; `unready` ones are listed and may not, and unknown
        ones of them are not registered.
        """
        plan = RosterPlan([], [], [], [])
        for worker_id, spec in named.items():
            known = catalog.find(worker_id)
            if known is not None and known.source != self.source and not known.is_absent:
                plan.conflicts.append((worker_id, known.source))
            elif known is None or known.spec != spec or known.source != self.source:
                plan.put.append(spec)
            elif known.unready is not None:
                plan.held_back.append((worker_id, None))
        mine = {worker.worker_id: worker for worker in catalog if worker.source == self.source}
        before, self._ended = self._ended, {}
        self.missed = 0
        for worker_id, worker in mine.items():
            if worker_id in named:
                continue
            state = _ABSENT if unready is None else unready.get(worker_id, _ABSENT)
            if state.has_ended:
                first = before.get(worker_id) or (now, self._connection(worker_id))
                if self._is_over(worker_id, *first, now):
                    plan.removed.append(worker_id)
                    continue
                self._ended[worker_id] = first
            self.missed += 1
            if worker.unready != state.why:
                plan.held_back.append((worker_id, state.why))
        return plan

    def _is_over(self, worker_id: int, since: float, connected: object, now: float) -> bool:
        """Whether no reason is left to keep a worker's state."""
        away_s = now - since
        if away_s < self._grace_s:
            return False
        if away_s >= self._engine_grace_s:
            return True
        same = connected is not None and self._connection(worker_id) == connected
        return not (same or self._has_requests(worker_id))
