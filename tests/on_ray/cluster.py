"""What the tests do with a cluster: run the service in it, look into it, kill parts of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.live.ports import HOST

PATIENCE_S = 180.0
"""For one thing to happen; Ray starts processes for it, which a busy machine takes minutes for."""
POLL_S = 0.05
SELECTORS = {"host": HOST, "num_cpus": 0.1}


@dataclass
class Cluster:
    """A cluster in which Serve runs."""

    port: int  # of Serve's proxy
    dashboard: str  # where Serve's REST API is

    def url(self, prefix: str) -> str:
        return f"http://{HOST}:{self.port}{prefix}"

    def run_selectors(self, name: str, replicas: int = 2, **flags: object) -> Selectors:
        """Run the service as a Serve application, on `/name`."""
        from ray import serve

        from select_service.serve_ray import app

        arguments = {**SELECTORS, "replicas": replicas, "namespace": name, **flags}
        serve.run(app(arguments), name=name, route_prefix=f"/{name}")
        selectors = Selectors(self, name)
        wait_until(lambda: len(selectors.urls()) == replicas, "selectors have met")
        return selectors


@dataclass
class Selectors:
    """The service in a cluster."""

    cluster: Cluster
    name: str

    @property
    def url(self) -> str:
        """By way of Serve's proxy."""
        return self.cluster.url(f"/{self.name}")

    def urls(self) -> list[str]:
        """Addresses of every selector that is there."""
        import asyncio

        from select_service.client.ray.registry import SelectorRegistry

        present = asyncio.run(SelectorRegistry(self.name).present())
        return sorted(url for url, _ in present.selectors.values())

    def active(self, url: str) -> int:
        """Requests one selector believes to be under way."""
        return sum(row["active_requests"] for row in self.rows(url))

    def loads_are_zero(self) -> bool:
        """Whether nothing is booked anywhere, in no unit."""
        urls = self.urls()
        return bool(urls) and not any(
            one
            for url in urls
            for row in self.rows(url)
            for name, one in row.items()
            if name not in ("worker_id", "dp_rank")
        )

    def rows(self, url: str) -> list[dict[str, int]]:
        """The load of every rank."""
        scopes = httpx.get(f"{url}/loads").raise_for_status().json()
        return [row for scope in scopes for row in scope["loads"]]

    def register(self, worker_id: int, **fields: object) -> None:
        """Put a worker into every catalog, by way of the proxy."""
        worker = {
            "worker_id": worker_id,
            "endpoint": f"ray://worker-{worker_id}",
            "block_size": 16,
            "kv_events_endpoint": f"tcp://{HOST}:9",
        }
        httpx.post(f"{self.url}/workers", json=worker | fields).raise_for_status()


def replicas(app: str, deployment: str) -> list[Any]:
    """Handles of the actors that are the replicas of a deployment."""
    import ray

    prefix = f"SERVE_REPLICA::{app}#{deployment}#"
    return [
        ray.get_actor(one["name"], namespace=one["namespace"])
        for one in ray.util.list_named_actors(all_namespaces=True)
        if one["name"].startswith(prefix)
    ]


def kill_replicas(app: str, deployment: str, count: int) -> int:
    """Kill so many replicas of a deployment, as a machine's end would; returns how many."""
    import ray

    found = replicas(app, deployment)[:count]
    for one in found:
        ray.kill(one, no_restart=True)
    return len(found)


def wait_until(is_so: Callable[[], Any], what: str) -> None:
    """Look until it is so."""
    deadline = time.monotonic() + PATIENCE_S
    trouble: object = None
    while time.monotonic() < deadline:
        try:
            if is_so():
                return
        except httpx.HTTPError as error:  # somebody who has just been killed
            trouble = error
        time.sleep(POLL_S)
    raise TimeoutError(f"not within {PATIENCE_S:g} s: {what} ({trouble!r})")
