"""A `coordination.k8s.io/v1` Lease, visible to all scalers in its namespace."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec
from typing_extensions import override

from select_service.planner.edge.leases.lease import DURATION_S, Timed
from select_service.planner.errors import ConnectorError

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.planner.edge.kube import Kube

_OK, _CREATED, _NOT_FOUND, _CONFLICT = 200, 201, 404, 409
_KIND: Final = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}


class _Meta(msgspec.Struct, rename="camel", omit_defaults=True):
    name: str
    resource_version: str = ""


class _Spec(msgspec.Struct, rename="camel", frozen=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    renew_time: str | None = None


class _Lease(msgspec.Struct):
    metadata: _Meta
    spec: _Spec = _Spec()


class KubeLease(Timed):
    """The right to act, as a Kubernetes object.

    Another holder's lease counts as given up if our own clock has seen it unrenewed for its
    duration: no wall clock has to be right.

    Args:
        kube: the API server.
        name: of the lease.
        identity: of this process.
        clock: monotonic seconds.
        duration_s: of the lease, published to others.
    """

    def __init__(
        self,
        kube: Kube,
        name: str,
        identity: str,
        clock: Callable[[], float],
        duration_s: float = DURATION_S,
    ) -> None:
        super().__init__(clock, duration_s)
        self._kube = kube
        self._name = name
        self._identity = identity
        self._all = f"/apis/coordination.k8s.io/v1/namespaces/{kube.namespace}/leases"
        self._path = f"{self._all}/{name}"
        self._seen: tuple[str | None, str | None] = (None, None)
        self._seen_at = clock()

    @override
    async def _ask(self) -> bool:
        answer = await self._kube.ask("GET", self._path)
        if answer.status == _NOT_FOUND:
            return await self._write("POST", self._all, "")
        lease = answer.read(f"lease {self._name}", _Lease)
        spec = lease.spec
        if (spec.holder_identity, spec.renew_time) != self._seen:
            self._seen, self._seen_at = (spec.holder_identity, spec.renew_time), self._clock()
        duration = spec.lease_duration_seconds or DURATION_S
        is_free = not spec.holder_identity or self._clock() - self._seen_at >= duration
        if spec.holder_identity != self._identity and not is_free:
            return False
        return await self._write("PUT", self._path, lease.metadata.resource_version)

    async def _write(self, method: str, path: str, version: str) -> bool:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = _Spec(self._identity, math.ceil(self._duration_s), now)
        body = msgspec.to_builtins(_Lease(_Meta(self._name, version), spec))
        answer = await self._kube.ask(method, path, _KIND | body)
        if answer.status == _CONFLICT:  # another planner was faster
            return False
        if answer.status not in (_OK, _CREATED):
            raise ConnectorError(f"lease {self._name}: {answer.problem}")
        return True

    @override
    async def _give_back(self) -> None:
        await self._kube.ask("PATCH", self._path, {"spec": {"holderIdentity": ""}}, merge=True)
