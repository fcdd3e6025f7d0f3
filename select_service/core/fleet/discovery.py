"""Compares a source's workers with the catalog: the changes that make both agree.

A source lists all its workers every time. It owns only the records it made: an id that something
else registered first is kept, and the clash is reported. `edge/discovery` looks, the driver applies
the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.core.fleet.catalog import Catalog
    from select_service.types import WorkerSpec

API: Final = "api"
"""The source of workers registered over HTTP or by embedding."""


class Plan(NamedTuple):
    """The changes to apply, in this order."""

    removed: list[int]
    put: list[WorkerSpec]
    conflicts: list[tuple[int, str]]  # worker_id, the source that owns it


class Roster:
    """One source's workers over time.

    Attributes:
        missed: number of its workers that the source does not list at present; they stay for a
            grace period, because a flap must not cost a worker's load and index.
    """

    def __init__(self, source: str, *, grace_s: float) -> None:
        self.source = source
        self._grace_s = grace_s
        self._missing_since: dict[int, float] = {}

    @property
    def missed(self) -> int:
        """Number of workers in their grace period."""
        return len(self._missing_since)

    def plan(self, named: Mapping[int, WorkerSpec], catalog: Catalog, now: float) -> Plan:
        """Compare; O(workers)."""
        plan = Plan([], [], [])
        for worker_id, spec in named.items():
            known = catalog.find(worker_id)
            if known is not None and known.source != self.source:
                plan.conflicts.append((worker_id, known.source))
            elif known is None or known.spec != spec:
                plan.put.append(spec)
        mine = {worker.worker_id for worker in catalog if worker.source == self.source}
        missing = mine - named.keys()
        self._missing_since = {
            worker_id: self._missing_since.get(worker_id, now) for worker_id in missing
        }
        for worker_id in sorted(missing):
            if now - self._missing_since[worker_id] >= self._grace_s:
                del self._missing_since[worker_id]
                plan.removed.append(worker_id)
        return plan
