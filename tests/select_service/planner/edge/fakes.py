"""A Kubernetes API server with scales and leases, and small helpers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from select_service.planner.edge.kube import Kube
from select_service.planner.types import ModelKey, PoolKey, Target

KEY = ModelKey("m")
PREFILL, DECODE = PoolKey(KEY, "prefill"), PoolKey(KEY, "decode")


def run(use: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(use(), 20.0))


def target(pool: PoolKey, replicas: int) -> Target:
    return Target(pool.model.model_name, pool.model.tenant_id, pool.role, replicas)


class FakeKube:
    """Objects by path; a scale lies below each."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.conflicts = 0
        self.caps_at: int | None = None
        self.is_down = False
        self.refuses = 0  # the status of every answer, if it is one
        self.version = 1

    def deployment(self, name: str, replicas: int, ready: int) -> None:
        path = f"/apis/apps/v1/namespaces/inference/deployments/{name}"
        self.objects[path] = {
            "kind": "Deployment",
            "metadata": {"name": name, "uid": "u"},
            "spec": {"replicas": replicas, "template": {"spec": {}}},
            "status": {"replicas": replicas, "readyReplicas": ready},
        }

    def kube(self, token_file: Path | None = None) -> Kube:
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        return Kube("https://kube", "inference", token_file, client=client)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("connection refused")
        body: Any = json.loads(request.content) if request.content else None
        path = request.url.path
        self.asked.append((request.method, path, dict(request.headers), body))
        if "/leases" in path:
            return self._lease(request.method, path, body)
        if self.refuses:
            return httpx.Response(self.refuses, json={"message": "no"})
        base = path.removesuffix("/scale")
        if base not in self.objects:
            return httpx.Response(404, json={"message": "not found"})
        if request.method == "PATCH":
            if self.conflicts:
                self.conflicts -= 1
                return httpx.Response(409, json={"message": "the object has been modified"})
            wanted = body["spec"]["replicas"]
            self.objects[base]["spec"]["replicas"] = (
                wanted if self.caps_at is None else min(wanted, self.caps_at)
            )
        found = self.objects[base]
        if path == base:
            return httpx.Response(200, json=found)
        spec, status = found["spec"], found["status"]
        scale = {"spec": {"replicas": spec["replicas"]}, "status": {"replicas": status["replicas"]}}
        return httpx.Response(200, json=scale)

    def _lease(self, method: str, path: str, body: Any) -> httpx.Response:
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return httpx.Response(409, json={"message": "exists"})
        elif path not in self.objects:
            return httpx.Response(404, json={"message": "not found"})
        elif method == "PUT":
            if body["metadata"].get("resourceVersion") != str(self.version):
                return httpx.Response(409, json={"message": "modified"})
        elif method == "PATCH":
            self.objects[path]["spec"] |= body["spec"]
        if method in ("POST", "PUT"):
            self.version += 1
            body["metadata"]["resourceVersion"] = str(self.version)
            self.objects[path] = body
        return httpx.Response(201 if method == "POST" else 200, json=self.objects[path])
