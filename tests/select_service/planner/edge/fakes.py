"""A Kubernetes API server with scales and leases, and small helpers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from select_service.kubernetes_api import KubernetesApi
from select_service.planner.edge.kube import Kube
from select_service.planner.types import ModelKey, PoolKey, Target

KEY = ModelKey("m")
NOWHERE = Path("/nonexistent")  # has no credentials
PREFILL, DECODE = PoolKey(KEY, "prefill"), PoolKey(KEY, "decode")


class Clock:
    """Goes when it is asked to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def target(pool: PoolKey, replicas: int) -> Target:
    return Target(pool.model.model_name, pool.model.tenant_id, pool.role, replicas)


REASONS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired"}
REASONS |= {415: "UnsupportedMediaType", 422: "Invalid", 429: "TooManyRequests"}


def refusal(
    code: int, message: str, headers: dict[str, str] | None = None, reason: str = ""
) -> httpx.Response:
    """What every error of an API server is: an object of kind Status."""
    reason = reason or REASONS.get(code, "InternalError")
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    body = status | {"message": message, "reason": reason, "code": code}
    return httpx.Response(code, json=body, headers=headers)


class FakeKube:
    """Objects by path; a scale lies below each.

    As the API conventions have it: errors are Status objects, a patch that names another
    `resourceVersion` than the object's is a conflict, one that is no merge patch is not supported,
    replicas below 0 are invalid, and numbers that are 0 are left out of a Scale. Pods lie beside;
    `control` takes those away that are too many, as the controllers choose them.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.conflicts = 0
        self.frozen: set[str] = set()  # names whose scale may not be changed
        self.hides: dict[str, int] = {}  # the status of an object, beside whose scale can be read
        self.caps_at: int | None = None
        self.is_down = False
        self.refuses = 0  # the status of every answer, if it is one
        self.refuses_leases = 0  # the same of those about leases
        self.retry_after = ""  # beside it
        self.breaks: Exception | None = None  # instead of an answer
        self.pods: dict[str, dict[str, Any]] = {}
        self.forbids_pods = False
        self.patched: Callable[[str], None] = lambda path: None
        self.version = 1

    def deployment(self, name: str, replicas: int, ready: int, plural: str = "deployments") -> None:
        path = f"/apis/apps/v1/namespaces/inference/{plural}/{name}"
        self.objects[path] = {
            "kind": {"deployments": "Deployment", "statefulsets": "StatefulSet"}[plural],
            "metadata": {"name": name, "uid": "u", "resourceVersion": "1"},
            "spec": {"replicas": replicas, "template": {"spec": {}}},
            "status": {"replicas": replicas, "readyReplicas": ready},
        }

    def replicas(self, name: str) -> int:
        """How many replicas a deployment is to have."""
        path = f"/apis/apps/v1/namespaces/inference/deployments/{name}"
        return int(self.objects[path]["spec"]["replicas"])

    def pod(self, name: str, of: str, ip: str) -> None:
        self.pods[name] = {
            "metadata": {"name": name, "labels": {"app": of}, "annotations": {"kept": "yes"}},
            "status": {"podIP": ip, "podIPs": [{"ip": ip}]},
        }

    def control(self, name: str, plural: str = "deployments") -> set[str]:
        """Take away the pods that are too many; returns the addresses of those."""
        path = f"/apis/apps/v1/namespaces/inference/{plural}/{name}"
        wanted = self.objects[path]["spec"]["replicas"]
        ours = [one for one in self.pods.values() if one["metadata"]["labels"]["app"] == name]

        def first_to_go(pod: dict[str, Any]) -> tuple[int, int]:
            metadata = pod["metadata"]
            cost = int(metadata["annotations"].get("controller.kubernetes.io/pod-deletion-cost", 0))
            ordinal = int(metadata["name"].rpartition("-")[2], 36)
            return (-ordinal, 0) if plural == "statefulsets" else (cost, ordinal)

        gone = sorted(ours, key=first_to_go)[: max(0, len(ours) - wanted)]
        for pod in gone:
            del self.pods[pod["metadata"]["name"]]
        self.objects[path]["status"] = {"replicas": wanted, "readyReplicas": wanted}
        return {str(pod["status"]["podIP"]) for pod in gone}

    def kube(self, credentials: Path = NOWHERE) -> Kube:
        client = httpx.AsyncClient(transport=httpx.MockTransport(self.answer))
        return Kube(KubernetesApi("https://kube", str(credentials), "inference"), client)

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("connection refused")
        body: Any = json.loads(request.content) if request.content else None
        path = request.url.path
        self.asked.append((request.method, path, dict(request.headers), body))
        if "/leases" in path:
            return self._lease(request.method, path, body)
        if self.breaks is not None:
            raise self.breaks
        if self.refuses:
            headers = {"retry-after": self.retry_after} if self.retry_after else {}
            return refusal(self.refuses, "no", headers)
        if "/pods" in path:
            return self._pod(request, path, body)
        base = path.removesuffix("/scale")
        if base not in self.objects:
            return refusal(404, "not found")
        found = self.objects[base]
        if request.method == "PATCH":
            wrong = self._wrong(request, body, found["metadata"])
            if wrong is not None:
                return wrong
            wanted = body["spec"]["replicas"]
            found["spec"]["replicas"] = (
                wanted if self.caps_at is None else min(wanted, self.caps_at)
            )
            found["metadata"]["resourceVersion"] = str(
                int(found["metadata"]["resourceVersion"]) + 1
            )
            self.patched(base)
        if path == base:
            hidden = self.hides.get(base.rpartition("/")[2])
            return httpx.Response(200, json=found) if not hidden else refusal(hidden, "not now")
        spec, status = found["spec"]["replicas"], found["status"]["replicas"]
        scale = {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": found["metadata"],
            "spec": {"replicas": spec} if spec else {},
            "status": {"replicas": status, "selector": f"app={found['metadata']['name']}"},
        }
        return httpx.Response(200, json=scale)

    def _pod(self, request: httpx.Request, path: str, body: Any) -> httpx.Response:
        if self.forbids_pods:
            return refusal(403, "pods is forbidden")
        if request.method == "GET":
            key, _, value = request.url.params["labelSelector"].partition("=")
            found = [
                one for one in self.pods.values() if one["metadata"]["labels"].get(key) == value
            ]
            return httpx.Response(200, json={"kind": "PodList", "items": found or None})
        name = path.rpartition("/")[2]
        if name not in self.pods:
            return refusal(404, f'pods "{name}" not found')
        annotations = self.pods[name]["metadata"]["annotations"]
        for annotation, value in body["metadata"]["annotations"].items():
            if value is None:  # as a merge patch has it
                annotations.pop(annotation, None)
            else:
                annotations[annotation] = value
        return httpx.Response(200, json=self.pods[name])

    def _wrong(
        self, request: httpx.Request, body: Any, metadata: dict[str, Any]
    ) -> httpx.Response | None:
        if request.headers["content-type"] != "application/merge-patch+json":
            return refusal(415, "the body of the request was in an unknown format")
        if metadata["name"] in self.frozen:
            return refusal(403, "may not be scaled")
        named = body.get("metadata", {}).get("resourceVersion", metadata["resourceVersion"])
        if self.conflicts or named != metadata["resourceVersion"]:
            self.conflicts = max(0, self.conflicts - 1)
            return refusal(409, "the object has been modified")
        replicas = body["spec"]["replicas"]
        if type(replicas) is not int or replicas < 0:
            return refusal(422, f"spec.replicas: Invalid value: {replicas!r}")
        return None

    def _lease(self, method: str, path: str, body: Any) -> httpx.Response:
        if self.refuses_leases:
            return refusal(self.refuses_leases, "no")
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return refusal(409, "exists", reason="AlreadyExists")
        elif path not in self.objects:
            return refusal(404, "not found")
        elif method == "PUT":
            if body["metadata"].get("resourceVersion") != str(self.version):
                return refusal(409, "modified")
        elif method == "PATCH":
            self.objects[path]["spec"] |= body["spec"]
        if method in ("POST", "PUT"):
            self.version += 1
            body["metadata"]["resourceVersion"] = str(self.version)
            self.objects[path] = body
        return httpx.Response(201 if method == "POST" else 200, json=self.objects[path])
