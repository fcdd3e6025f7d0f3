"""Why the workers of a scope take no requests: what a refusal for want of one adds to its text.

Only workers that are not schedulable are kept, so a healthy fleet costs nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from select_service.errors.placement import none_registered

if TYPE_CHECKING:
    from collections.abc import Iterable

    from indexer.types import Scope
    from select_service.core.fleet.catalog import Catalog, Worker

REASONS_MAX: Final = 4
"""Reasons that one refusal names, the most frequent ones."""


class UnschedulableWorkers:
    """The workers that take no requests, by scope."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._held: dict[Scope, dict[int, Worker]] = {}
        self._told: dict[Scope, list[str]] = {}
        """As long as nothing changes: under load a scope without workers is asked for often."""
        catalog.watchers.append(self._note)

    def _note(self, scope: Scope, worker_id: int) -> None:
        """Follow a change of the catalog."""
        self._told.pop(scope, None)
        worker = self._catalog.find(worker_id)
        if worker is not None and worker.scope == scope and worker.lifecycle != "schedulable":
            self._held.setdefault(scope, {})[worker_id] = worker
            return
        held = self._held.get(scope)
        if held is not None and held.pop(worker_id, None) is not None and not held:
            del self._held[scope]

    def holds(self, scope: Scope) -> bool:
        """Whether the scope has such workers."""
        return scope in self._held

    def reasons(self, scope: Scope) -> list[str]:
        """Return why nobody takes the requests of a scope, for people, the most frequent first.

        O(workers of the scope) after a change, else O(1).
        """
        held = self._held.get(scope)
        if held is None:
            return [none_registered(scope)]
        told = self._told.get(scope)
        if told is None:
            told = self._told[scope] = _counted(held.values())
        return told


def _counted(workers: Iterable[Worker]) -> list[str]:
    found = Counter((one.lifecycle, one.reasons[0] if one.reasons else "") for one in workers)
    reasons = []
    for (lifecycle, reason), count in found.most_common(REASONS_MAX):
        why = reason.removeprefix(lifecycle).removeprefix(": ")
        told = f"{lifecycle}: {why}" if why else lifecycle
        reasons.append(f"{count} worker{'s are' if count > 1 else ' is'} {told}")
    left = found.total() - sum(count for _, count in found.most_common(REASONS_MAX))
    return [*reasons, f"{left} more, for other reasons"] if left else reasons
