"""Which pod has a worker id that several claim: one of them, always the same; the others have none.

A `worker-id` annotation comes with a pod template, so each of its pods has it. The id belongs to
the oldest pod that is not leaving (`creationTimestamp`, then the name), ready or not: an id that
followed readiness would go back and forth. Endpoints have no age: the one that has the id keeps it,
and the first is one that is ready, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.edge.discovery.objects import TERMINATING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from select_service.edge.discovery.objects import DiscoveredPod
    from select_service.types import WorkerSpec


class WorkerIdClaims:
    """Who has which id, over time.

    Attributes:
        shared: the pods that were refused an id at the last look, by id.
        refused: the same pods, and why.
    """

    def __init__(self) -> None:
        self.shared: dict[int, list[str]] = {}
        self.refused: dict[str, str] = {}
        self._owners: dict[int, str] = {}  # of ids whose pods have no age

    def settle(self, found: Iterable[DiscoveredPod]) -> list[DiscoveredPod]:
        """Return one pod for each id, as one object of several may say it."""
        pods: dict[tuple[int, str], DiscoveredPod] = {}
        for one in found:
            key = one.worker_id, one.pod
            pods[key] = _merged(pods[key], one) if key in pods else one
        claims: dict[int, list[DiscoveredPod]] = {}
        for one in pods.values():
            claims.setdefault(one.worker_id, []).append(one)
        before, self._owners = self._owners, {}
        self.shared, self.refused = {}, {}
        return [self._owner(claim, before.get(worker_id)) for worker_id, claim in claims.items()]

    def _owner(self, claim: list[DiscoveredPod], before: str | None) -> DiscoveredPod:
        def order(one: DiscoveredPod) -> tuple[bool, str, bool, bool, str]:
            ageless = not one.created
            return (
                one.is_leaving,
                one.created,
                ageless and one.pod != before,
                ageless and one.spec is None,
                one.pod,
            )

        owner, *others = sorted(claim, key=order)
        if not owner.created:
            self._owners[owner.worker_id] = owner.pod
        # one that leaves has had the id, and its successor has it now
        refused = [one.pod for one in others if not one.is_leaving]
        if refused:
            self.shared[owner.worker_id] = [owner.pod, *refused]
            why = f"worker-id {owner.worker_id} is that of {owner.pod}"
            self.refused |= dict.fromkeys(refused, why)
        return owner


def _merged(one: DiscoveredPod, other: DiscoveredPod) -> DiscoveredPod:
    """Return what two objects say of a pod; one for each address family names it, for example.

    It leaves if either says so, and is ready if either says so; the first that is ready names its
    address, and of two families IPv4 does: slices that are made anew have other names, and another
    address would be another engine.
    """
    if one.is_leaving or other.is_leaving:
        return one._replace(spec=None, unready=TERMINATING)
    if one.spec is None or other.spec is None:
        return other if one.spec is None and other.spec is not None else one
    return other if _is_ipv6(one.spec) and not _is_ipv6(other.spec) else one


def _is_ipv6(spec: WorkerSpec) -> bool:
    return any("[" in at for at in (spec.endpoint or "", *spec.kv_events_endpoints.values()))
