"""Only one planner acts: a lock on a file, or a Lease in Kubernetes.

The file is for one machine (`--state-dir`): the kernel lets go of it when the process ends, however
it ends. A Lease is for a cluster: whoever holds it renews it, and who has not renewed it for its
duration has lost it. The one who does not hold it watches, and decides nothing.
"""

from __future__ import annotations

import fcntl
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from select_service.planner.errors import ConnectorError, PlannerError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from select_service.planner.edge.kube import Kube

__all__ = ["FileLease", "KubeLease", "Lease", "NoLease"]

DURATION_S: Final = 30
_OK, _CREATED, _NOT_FOUND, _CONFLICT = 200, 201, 404, 409


class Lease(Protocol):
    """The right to act."""

    async def held(self) -> bool:
        """Take it or keep it; False: another planner has it."""

    async def close(self) -> None:
        """Let go of it."""


class NoLease:
    """There is nothing to fight about: a dry run."""

    async def held(self) -> bool:
        """Always."""
        return True

    async def close(self) -> None:
        """Nothing is held."""


class FileLease:
    """A lock on a file in the state directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    async def held(self) -> bool:
        """Try to lock it, once; a held lock stays held.

        Raises:
            PlannerError: the file cannot be opened.
        """
        if self._file is not None:
            return True
        try:
            opened = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PlannerError(f"{self._path}: {error.strerror}") from error
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(opened)
            return False
        self._file = opened
        return True

    async def close(self) -> None:
        """Unlock it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


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


class KubeLease:
    """A `coordination.k8s.io/v1` Lease.

    Another's lease counts as given up when it was not renewed for its duration by our own clock
    since we first saw it like that: nobody's wall clock has to be right.

    Args:
        kube: the API server.
        name: of the lease.
        identity: of this process.
        clock: monotonic seconds.
    """

    def __init__(self, kube: Kube, name: str, identity: str, clock: Callable[[], float]) -> None:
        self._kube = kube
        self._name = name
        self._identity = identity
        self._clock = clock
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{kube.namespace}/leases"
        self._seen: tuple[str | None, str | None] = (None, None)
        self._seen_at = clock()
        self._renewed_at: float | None = None

    async def held(self) -> bool:
        """Create, take over or renew it.

        When the server cannot be asked it is held as long as nobody else can have taken it.
        """
        try:
            is_ours = await self._turn()
        except ConnectorError:
            renewed = self._renewed_at
            return renewed is not None and self._clock() < renewed + DURATION_S
        if is_ours:
            self._renewed_at = self._clock()
        else:
            self._renewed_at = None
        return is_ours

    async def _turn(self) -> bool:
        answer = await self._kube.ask("GET", f"{self._path}/{self._name}")
        if answer.status == _NOT_FOUND:
            return await self._write("POST", self._path, "")
        if answer.status != _OK:
            raise ConnectorError(f"lease {self._name}: {answer.said}")
        lease = msgspec.convert(answer.body, type=_Lease)
        spec = lease.spec
        if (spec.holder_identity, spec.renew_time) != self._seen:
            self._seen, self._seen_at = (spec.holder_identity, spec.renew_time), self._clock()
        duration = spec.lease_duration_seconds or DURATION_S
        is_free = not spec.holder_identity or self._clock() - self._seen_at >= duration
        if spec.holder_identity != self._identity and not is_free:
            return False
        path = f"{self._path}/{self._name}"
        return await self._write("PUT", path, lease.metadata.resource_version)

    async def _write(self, method: str, path: str, version: str) -> bool:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        lease = _Lease(_Meta(self._name, version), _Spec(self._identity, DURATION_S, now))
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        told = msgspec.to_builtins(lease)
        answer = await self._kube.ask(method, path, body | told)
        if answer.status == _CONFLICT:  # somebody was faster
            return False
        if answer.status not in (_OK, _CREATED):
            raise ConnectorError(f"lease {self._name}: {answer.said}")
        return True

    async def close(self) -> None:
        """Give it back, so that a successor need not wait."""
        if self._renewed_at is None:
            return
        path = f"{self._path}/{self._name}"
        body = {"spec": {"holderIdentity": ""}}
        try:
            await self._kube.ask("PATCH", path, body, merge=True)
        except ConnectorError:
            return  # it lapses by itself
