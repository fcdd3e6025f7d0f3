"""The pods behind a scale: which of them Kubernetes removes when the count is lowered.

A ReplicaSet follows the annotation `controller.kubernetes.io/pod-deletion-cost`: leaving pods are
marked with it. A StatefulSet or a LeaderWorkerSet removes the highest ordinals, so its leaving pods
are known. A worker's pod is the one with its endpoint's address or name: `engine-3.engines.llm.svc`
is in the pod `engine-3`.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import quote

import msgspec

from select_service.planner.edge.http_answers import OK
from select_service.planner.edge.kube import Scaled
from select_service.planner.errors import ConnectorError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from select_service.planner.edge.kube import Json, KubeAnswer

DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
FIRST_TO_GO: Final = str(-(2**31))
"""The lowest possible cost: an int32."""
_BY_ORDINAL: Final = frozenset({"statefulsets", "leaderworkersets"})
_NOT_FOUND: Final = 404
Ask: TypeAlias = "Callable[[str, str, Json | None], Coroutine[None, None, KubeAnswer]]"
"""Called with method, path and a patch."""


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class _Address(msgspec.Struct, frozen=True):
    ip: str


class _PodStatus(msgspec.Struct, frozen=True, rename={"ip": "podIP", "ips": "podIPs"}):
    ip: str | None = None
    ips: list[_Address] | None = None  # of both address families


class PodSummary(msgspec.Struct, frozen=True):
    """One pod, with the fields needed to choose which go."""

    metadata: _Meta
    status: _PodStatus = _PodStatus()

    @property
    def addresses(self) -> set[str]:
        """All its addresses."""
        found = {one.ip for one in self.status.ips or ()}
        return found | {self.status.ip} if self.status.ip else found

    @property
    def goes_first(self) -> bool:
        """Whether it is marked to go first."""
        return (self.metadata.annotations or {}).get(DELETION_COST) == FIRST_TO_GO


class _Pods(msgspec.Struct):
    items: list[PodSummary] | None = None  # Go writes an empty list as null


class Homes:
    """Finds the pod of a worker's host, among some pods."""

    def __init__(self, pods: Iterable[PodSummary]) -> None:
        self._names: dict[str, str] = {}
        for pod in pods:
            for address in {_same(one) for one in pod.addresses}:
                # pods in one machine's network share an address, so it identifies none
                self._names[address] = "" if address in self._names else pod.metadata.name
            self._names[pod.metadata.name] = pod.metadata.name

    def of(self, host: str) -> str:
        """Return the pod with this address, or named like the host's first label; empty: none."""
        same = _same(host)
        return self._names.get(same if same in self._names else host.partition(".")[0], "")


class Pods:
    """The pods of one resource.

    Args:
        ask: the API server.
        namespace: of the resource.
        path: of the resource.
    """

    def __init__(self, ask: Ask, namespace: str, path: str) -> None:
        self._ask = ask
        self._folder = f"/api/v1/namespaces/{namespace}/pods"
        self._path = path
        _, plural, self._name = path.rsplit("/", 2)
        self.go_by_ordinal = plural in _BY_ORDINAL
        """No choice: the highest ordinals go."""

    async def there(self) -> list[PodSummary]:
        """Return the pods that are not being stopped.

        Raises:
            ConnectorError: the resource does not name its pods, or they may not be read.
        """
        answer = await self._ask("GET", f"{self._path}/scale", None)
        labels = answer.read(f"{self._path}/scale", Scaled).status.selector
        if not labels:
            raise ConnectorError(f"{self._path}/scale names no selector of its pods")
        path = f"{self._folder}?labelSelector={quote(labels)}"
        answer = await self._ask("GET", path, None)
        found = answer.read(path, _Pods).items
        return [one for one in found or () if one.metadata.deletion_timestamp is None]

    def by_ordinal(self, pods: Sequence[PodSummary]) -> list[PodSummary]:
        """Return the pods with an ordinal, first to go first."""
        prefix = f"{self._name}-"
        ordinals = {
            int(rest): one
            for one in pods
            if (rest := one.metadata.name.removeprefix(prefix)).isdecimal()
            and one.metadata.name.startswith(prefix)
        }
        return [ordinals[number] for number in sorted(ordinals, reverse=True)]

    async def mark(self, pod: PodSummary, *, goes_first: bool) -> None:
        """Mark whether a pod goes before all others; a pod that is gone needs no mark.

        Raises:
            ConnectorError: it may not be marked.
        """
        if pod.goes_first == goes_first:
            return
        path = f"{self._folder}/{pod.metadata.name}"
        cost = FIRST_TO_GO if goes_first else None
        body: Json = {"metadata": {"annotations": {DELETION_COST: cost}}}
        answer = await self._ask("PATCH", path, body)
        if answer.status not in (OK, _NOT_FOUND):
            raise ConnectorError(f"{path}: {answer.problem}")


def _same(host: str) -> str:
    """Normalise an address."""
    try:
        return str(ip_address(host))
    except ValueError:
        return host
