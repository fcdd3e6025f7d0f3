"""A lease kept by a named, detached actor of Ray, which all scalers in the cluster can reach."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from select_service.planner.edge.leases import lease_actor
from select_service.planner.edge.leases.lease import DURATION_S, Timed
from select_service.planner.errors import ConnectorError

if TYPE_CHECKING:
    from collections.abc import Callable

NAMESPACE: Final = "select-planner"
"""Of the actor."""
ANSWER_S: Final = 5.0
"""Longest wait for the actor: it may have to be restarted elsewhere."""


class RayLease(Timed):
    """The right to act, as an actor of Ray.

    Args:
        ray: the module, connected.
        name: of the lease.
        identity: of this process.
        clock: monotonic seconds.
        duration_s: of the lease.
    """

    def __init__(
        self,
        ray: Any,
        name: str,
        identity: str,
        clock: Callable[[], float],
        duration_s: float = DURATION_S,
    ) -> None:
        super().__init__(clock, duration_s)
        self._ray = ray
        self._name = name
        self._identity = identity
        self._actor: Any = None

    @override
    async def _ask(self) -> bool:
        holds = self.is_sure
        holder = await self._call("hold", self._identity, self._duration_s, holds=holds)
        return bool(holder == self._identity)

    @override
    async def _give_back(self) -> None:
        await self._call("release", self._identity)

    async def _call(self, verb: str, *arguments: object, **named: object) -> Any:
        ray = self._ray

        def call() -> Any:
            if self._actor is None:
                self._actor = _find(ray, self._name)
            return ray.get(getattr(self._actor, verb).remote(*arguments, **named), timeout=ANSWER_S)

        try:
            return await asyncio.to_thread(call)
        except (ValueError, TimeoutError, OSError, RuntimeError, ray.exceptions.RayError) as error:
            self._actor = None  # the next call looks it up again
            raise ConnectorError(f"lease {self._name}: {error}") from error


def _find(ray: Any, name: str) -> Any:
    ray.cloudpickle.register_pickle_by_value(lease_actor)  # its machine need not have this package
    try:
        made = ray.remote(lease_actor.LeaseActor).options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",  # it outlives its creator
            max_restarts=-1,
            num_cpus=0,
        )
        return made.remote()
    finally:
        ray.cloudpickle.unregister_pickle_by_value(lease_actor)
