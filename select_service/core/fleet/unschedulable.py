"""Why the workers of a scope take no requests: what a refusal for want of one adds to its text.

Only workers that are not schedulable are kept, so a healthy fleet costs nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from select_service.errors.placement import none_registered

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from indexer.types import Scope
    from select_service.core.fleet.catalog import Catalog, Worker

REASONS_MAX: Final = 4
"""Reasons that one refusal names, the most frequent ones."""


MODELS_MAX: Final = 8
"""Models of the tenant that a refusal for an unknown one names."""


class UnschedulableWorkers:
    """The workers that take no requests, by scope."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._held: dict[Scope, dict[int, Worker]] = {}
        self._reasons: dict[Scope, list[str]] = {}
        """As long as nothing changes: under load a scope without workers is asked for often."""
        self._models: dict[str, str] | None = None
        """Of each tenant the models that it has workers of, likewise."""
        catalog.watchers.append(self._note)

    def _note(self, scope: Scope, worker_id: int) -> None:
        """Follow a change of the catalog."""
        self._reasons.pop(scope, None)
        self._models = None
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
        """Return why no worker takes the requests of a scope, for people, the most frequent first.

        Where none is registered, the tenant's other models are named: of other tenants
        nothing may be shown. O(workers) after a change, else O(1).
        """
        held = self._held.get(scope)
        if held is None:
            models = self._models_by_tenant().get(scope.tenant_id)
            others = [f"tenant={scope.tenant_id} has workers of {models}"] if models else []
            return [none_registered(scope), *others]
        reasons = self._reasons.get(scope)
        if reasons is None:
            reasons = self._reasons[scope] = _counted(held.values())
        return reasons

    def _models_by_tenant(self) -> dict[str, str]:
        if self._models is None:
            found: dict[str, set[str]] = {}
            for worker in self._catalog:
                found.setdefault(worker.scope.tenant_id, set()).add(worker.scope.model_name)
            self._models = {tenant: _listed(sorted(models)) for tenant, models in found.items()}
        return self._models


def _listed(models: Sequence[str]) -> str:
    more = len(models) - MODELS_MAX
    rest = f" and {more} more" if more > 0 else ""
    return f"model={', model='.join(models[:MODELS_MAX])}{rest}"


def _counted(workers: Iterable[Worker]) -> list[str]:
    found = Counter((one.lifecycle, one.reasons[0] if one.reasons else "") for one in workers)
    reasons = []
    for (lifecycle, reason), count in found.most_common(REASONS_MAX):
        why = reason.removeprefix(lifecycle).removeprefix(": ")
        state = f"{lifecycle}: {why}" if why else lifecycle
        reasons.append(f"{count} worker{'s are' if count > 1 else ' is'} {state}")
    left = found.total() - sum(count for _, count in found.most_common(REASONS_MAX))
    return [*reasons, f"{left} more, for other reasons"] if left else reasons
