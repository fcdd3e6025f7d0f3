"""A pool the planner scales: a Serve application that does nothing, and an actor with a count."""

from __future__ import annotations

import ray
from ray import serve

POOL = "Pool"


@serve.deployment(name=POOL, num_replicas=1, ray_actor_options={"num_cpus": 0.01})
class Nothing:
    """One replica."""

    async def __call__(self) -> str:
        return "here"


app = Nothing.bind()  # type: ignore[attr-defined] # the decorator gives it that


@ray.remote(num_cpus=0.01)
class OwnPool:
    """Scales something of its own: replicas are there one look after they were asked for."""

    def __init__(self) -> None:
        self._desired = self._ready = 1

    def replicas(self) -> tuple[int, int]:
        counts = self._desired, self._ready
        self._ready = self._desired
        return counts

    def scale(self, replicas: int) -> None:
        self._desired = replicas
