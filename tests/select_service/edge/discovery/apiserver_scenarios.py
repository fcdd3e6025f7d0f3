"""What discovery makes of a real API server: scenarios that are recorded, and played again.

`python -m tests.live.record_apiserver` plays them against a server and writes down what that says;
`test_recorded_apiserver.py` plays them against what was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final
from unittest import mock

import httpx

from select_service.edge.discovery import kubernetes, setup
from select_service.edge.discovery.source import DiscoverySource
from select_service.kubernetes_api import KubernetesApi
from select_service.types import WorkerSpec
from tests.live.apiserver import NAMESPACE, Admin
from tests.live.recorded_apiserver import Scenario, World
from tests.wait import PATIENCE_S, until

Workers = DiscoverySource[dict[int, WorkerSpec]]
PODS: Final = f"/api/v1/namespaces/{NAMESPACE}/pods"
SLICES: Final = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
OLD_SLICES: Final = SLICES.replace("/v1/", "/v1beta1/")
"""Of 1.20, which has no other yet."""
ROLE: Final = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles/select-service"
PAGE: Final = 2
BACKOFF_S: Final = 0.05


def hosts(source: Workers) -> set[str]:
    """Where the workers are that may be chosen."""
    found = (spec.endpoint or "" for spec in (source.latest or {}).values())
    return {one.removeprefix("http://").removesuffix(":8000") for one in found}


def reasons(source: Workers) -> list[str]:
    """Why others may not."""
    return sorted(one.why for one in source.unready.values())


@contextlib.asynccontextmanager
async def followed(world: World, slices: str = "") -> AsyncIterator[Workers]:
    """A source that looks at the cluster's pods, or at EndpointSlices under this path."""
    api = KubernetesApi(world.url, str(world.credentials))
    with (
        mock.patch.object(setup, "_SLICES", slices),
        mock.patch.object(kubernetes, "PAGE_OBJECTS", PAGE),
    ):
        source = setup.watched_workers(api, "app=vllm", slices=bool(slices), backoff_s=BACKOFF_S)
        looking = asyncio.ensure_future(source.run())
        try:
            yield source
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)


# -- what scheduler, kubelet and controllers do ----------------------------------------------------


def create(name: str, **annotations: str) -> Callable[[Admin], object]:
    """A pod that has a node and nothing else yet."""
    said = {f"select-service.io/{key.replace('_', '-')}": v for key, v in annotations.items()}
    ports = [{"name": "http", "containerPort": 8000}, {"name": "kv-events", "containerPort": 5557}]
    containers = [{"name": "engine", "image": "vllm", "ports": ports}]
    one = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "vllm"}, "annotations": said},
        "spec": {"nodeName": "node-a", "containers": containers},
    }
    return lambda admin: admin.apply(one, "pods")


def status(name: str, phase: str, *ips: str, ready: bool = True) -> Callable[[Admin], object]:
    """The status of a pod, as a kubelet reports it."""
    said: dict[str, Any] = {
        "phase": phase,
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True" if ready else "False"},
        ],
    }
    if ips:
        said |= {"podIP": ips[0], "podIPs": [{"ip": ip} for ip in ips]}
    return lambda admin: admin.do("PATCH", f"{PODS}/{name}/status", {"status": said})


def run(name: str, *ips: str, **annotations: str) -> Callable[[Admin], object]:
    """A pod that is ready at once."""
    return both(create(name, **annotations), status(name, "Running", *ips))


def delete(name: str, grace_s: int) -> Callable[[Admin], object]:
    return lambda admin: admin.do("DELETE", f"{PODS}/{name}?gracePeriodSeconds={grace_s}")


def patch(path: str, body: Any) -> Callable[[Admin], object]:
    return lambda admin: admin.do("PATCH", path, body)


def both(*actions: Callable[[Admin], object]) -> Callable[[Admin], object]:
    return lambda admin: [action(admin) for action in actions]


THREE: Final = both(run("w-0", "10.1.0.1"), run("w-1", "10.1.0.2"), create("w-2"))


# -- scenarios -------------------------------------------------------------------------------------


async def pods(world: World) -> None:
    """All that happens to a pod."""
    await world.step("three pods, one of which waits", THREE)
    async with followed(world) as source:

        async def become(*expected: str) -> None:
            await until(lambda: hosts(source) == set(expected), lambda: hosts(source))

        await become("10.1.0.1", "10.1.0.2")
        assert reasons(source) == ["phase Pending"]
        await world.step(
            "the third has an address", status("w-2", "Running", "10.1.0.3", ready=False)
        )
        await until(lambda: reasons(source) == ["not ready"])
        await world.step("and is ready", status("w-2", "Running", "10.1.0.3"))
        await become("10.1.0.1", "10.1.0.2", "10.1.0.3")
        await world.step(
            "the second is not ready", status("w-1", "Running", "10.1.0.2", ready=False)
        )
        await become("10.1.0.1", "10.1.0.3")
        assert reasons(source) == ["not ready"]
        await world.step("and is again", status("w-1", "Running", "10.1.0.2"))
        await become("10.1.0.1", "10.1.0.2", "10.1.0.3")
        await world.step("the first is deleted", delete("w-0", 30))
        await become("10.1.0.2", "10.1.0.3")
        assert reasons(source) == ["terminating"]
        await world.step("and has gone", delete("w-0", 0))
        await until(lambda: not source.unready)
        await world.step("the second fails", status("w-1", "Failed", "10.1.0.2", ready=False))
        await become("10.1.0.3")
        assert [one.has_ended for one in source.unready.values()] == [True]
        await world.step("and is deleted", delete("w-1", 30))
        await until(lambda: not source.unready)
        label: Any = {"metadata": {"labels": {"app": "other"}}}
        await world.step("the third loses its label", patch(f"{PODS}/w-2", label))
        await become()
        assert not source.unready
        label = {"metadata": {"labels": {"app": "vllm"}}}
        await world.step("and gets it back", patch(f"{PODS}/w-2", label))
        await become("10.1.0.3")
        await world.step(
            "two have one id",
            both(run("w-3", "10.1.0.4", worker_id="7"), run("w-4", "10.1.0.5", worker_id="7")),
        )
        await until(lambda: bool(source.shared))
        await become("10.1.0.3", "10.1.0.4")
        await world.step("one of both address families", run("w-5", "fd00::6", "10.1.0.6"))
        await become("10.1.0.3", "10.1.0.4", "[fd00::6]")
        bad = {"metadata": {"annotations": {"select-service.io/block-size": "many"}}}
        await world.step("an annotation is wrong", patch(f"{PODS}/w-5", bad))
        await become("10.1.0.3", "10.1.0.4")
        assert "block-size" in source.rejected[f"{NAMESPACE}/w-5"]
        assert source.failures == {}


def endpoint_slice(name: str, family: str, *endpoints: Any) -> dict[str, Any]:
    ports = [{"name": "http", "port": 8000, "protocol": "TCP"}]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"app": "vllm"}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": ports,
    }


def endpoint(pod: str, address: str, **conditions: bool) -> dict[str, Any]:
    target = {"kind": "Pod", "namespace": NAMESPACE, "name": pod}
    return {"addresses": [address], "conditions": conditions, "targetRef": target}


def put(path: str, *slices: dict[str, Any]) -> Callable[[Admin], object]:
    """Create EndpointSlices of the version that a path names."""
    version = "/".join(path.split("/")[2:4])
    made = [one | {"apiVersion": version} for one in slices]
    return lambda admin: [admin.do("POST", path, one) for one in made]


async def slices(world: World, path: str = OLD_SLICES) -> None:
    """What EndpointSlices say."""
    both_ready = endpoint("w-0", "10.1.0.1", ready=True), endpoint("w-1", "10.1.0.2", ready=True)
    two, empty = endpoint_slice("vllm-a", "IPv4", *both_ready), endpoint_slice("vllm-b", "IPv4")

    def become(*endpoints: Any) -> Callable[[Admin], object]:
        return patch(f"{path}/vllm-a", {"endpoints": list(endpoints)})

    await world.step("two endpoints, and none", put(path, two, empty))
    async with followed(world, path) as source:
        await until(lambda: hosts(source) == {"10.1.0.1", "10.1.0.2"})
        not_ready = endpoint("w-1", "10.1.0.2", ready=False, serving=False, terminating=False)
        await world.step("one is not ready", become(both_ready[0], not_ready))
        await until(lambda: hosts(source) == {"10.1.0.1"})
        assert reasons(source) == ["not ready"]
        terminating = endpoint("w-1", "10.1.0.2", ready=False, serving=True, terminating=True)
        await world.step("and terminates", become(both_ready[0], terminating))
        await until(lambda: reasons(source) == ["terminating"])
        await world.step("nothing is said of its state", become(endpoint("w-0", "10.1.0.1")))
        await until(lambda: not source.unready)
        assert hosts(source) == {"10.1.0.1"}
        v6 = endpoint_slice("vllm-c", "IPv6", endpoint("w-6", "fd00::7", ready=True))
        await world.step("IPv6", put(path, v6))
        await until(lambda: hosts(source) == {"10.1.0.1", "[fd00::7]"})
        await world.step("a slice goes", lambda admin: admin.do("DELETE", f"{path}/vllm-a"))
        await until(lambda: hosts(source) == {"[fd00::7]"})
        assert source.failures == {}


async def end_of_a_watch(world: World) -> None:
    """A bookmark comes before the end, and the next watch begins there."""
    label = {"metadata": {"labels": {"app": "other"}}}
    others = both(create("other"), patch(f"{PODS}/other", label))
    await world.step("a pod, and another", both(run("w-0", "10.1.0.1"), others))
    with mock.patch.object(kubernetes, "WATCH_S", 5):
        async with followed(world) as source:
            await until(lambda: hosts(source) == {"10.1.0.1"})
            await world.step("others change for two watches", busy_elsewhere)
            await until(lambda: source.progress >= 1)
            assert source.updates == 1, "nothing but bookmarks"
            await world.step("a pod comes", run("w-1", "10.1.0.2"))
            await until(lambda: hosts(source) == {"10.1.0.1", "10.1.0.2"})
            assert source.failures == {}


def busy_elsewhere(admin: Admin) -> None:
    label: Any = {"metadata": {"labels": {"app": "other"}}}
    for number in range(24):
        label["metadata"]["labels"]["n"] = str(number)
        patch(f"{PODS}/other", label)(admin)
        time.sleep(0.5)


async def gone(world: World) -> None:
    """The version watched from is too old."""
    await world.step("three pods", THREE)

    def changes(admin: Admin) -> None:
        delete("w-0", 0)(admin)
        status("w-2", "Running", "10.1.0.3")(admin)
        admin.cluster.stop("kube-apiserver")
        admin.cluster.start_server()  # it remembers nothing before

    async with followed(world) as source:
        await until(lambda: hosts(source) == {"10.1.0.1", "10.1.0.2"})
        await world.step("nobody watches", changes, cut=True)
        await until(lambda: hosts(source) == {"10.1.0.2", "10.1.0.3"})
        assert source.failures.get("gone"), source.failures
        await world.step("one more", run("w-3", "10.1.0.4"))
        await until(lambda: len(hosts(source)) == 3)


async def expired_pages(world: World) -> None:
    """What is left of a list can expire before it is read."""
    await world.step("three pods", THREE)
    world.before("continue=", expire)
    async with followed(world) as source:
        await until(lambda: hosts(source) == {"10.1.0.1", "10.1.0.2"})
        assert source.failures == {"gone": 1}
        await world.step("one more", run("w-3", "10.1.0.4"))
        await until(lambda: len(hosts(source)) == 3)


def expire(admin: Admin) -> None:
    run("late", "10.1.0.9")(admin)
    delete("late", 0)(admin)
    admin.cluster.compact()


async def outage(world: World) -> None:
    """The server is killed, and so is etcd."""
    await world.step("three pods", THREE)

    def server(admin: Admin) -> None:
        admin.cluster.stop("kube-apiserver", kill=True)
        admin.cluster.start_server()
        delete("w-0", 0)(admin)

    def etcd(admin: Admin) -> None:
        admin.cluster.stop("etcd", kill=True)

    def etcd_again(admin: Admin) -> None:
        admin.cluster.start_etcd()
        run("w-3", "10.1.0.4")(admin)

    async with followed(world) as source:
        await until(lambda: hosts(source) == {"10.1.0.1", "10.1.0.2"})
        await world.step("the server is killed and comes back", server)
        await until(lambda: hosts(source) == {"10.1.0.2"})
        await world.step("etcd is killed", etcd)
        async with httpx.AsyncClient() as client:
            await client.get(world.url + PODS, headers=bearer(world), timeout=PATIENCE_S)
        assert hosts(source) == {"10.1.0.2"}
        await world.step("and comes back", etcd_again)
        await until(lambda: hosts(source) == {"10.1.0.2", "10.1.0.4"})


def bearer(world: World) -> dict[str, str]:
    return {"authorization": f"Bearer {(world.credentials / 'token').read_text()}"}


async def restored(world: World) -> None:
    """Etcd is restored from a backup: versions go back."""
    await world.step("three pods", both(THREE, lambda admin: admin.cluster.save_etcd()))
    with (
        mock.patch.object(kubernetes, "WATCH_S", 5),
        mock.patch.object(kubernetes, "WATCH_SHORT_S", 0.0),  # played again, it takes no time
    ):
        async with followed(world) as source:
            await until(lambda: hosts(source) == {"10.1.0.1", "10.1.0.2"})
            many = [patch(f"{PODS}/w-2", {"metadata": {"labels": {"n": str(n)}}}) for n in range(9)]
            await world.step("one that will not have been", both(run("w-3", "10.1.0.4"), *many))
            await until(lambda: len(hosts(source)) == 3)
            await world.step("back", lambda admin: admin.cluster.restore_etcd(), cut=True)
            await until(lambda: hosts(source) == {"10.1.0.1", "10.1.0.2"})
            await world.step("one more", run("w-4", "10.1.0.5"))
            await until(lambda: hosts(source) == {"10.1.0.1", "10.1.0.2", "10.1.0.5"})


async def rights(world: World) -> None:
    """A token that is not accepted, and rights that are taken away."""
    await world.step("three pods", THREE)
    token = world.credentials / "token"
    ours = token.read_text()
    token.write_text("nobody's")
    async with followed(world) as source:
        await until(lambda: bool(source.failures))
        assert set(source.failures) == {"unauthorized"}
        assert f"status 401 for {PODS}: Unauthorized" in source.trouble
        token.write_text(ours)
        await until(lambda: hosts(source) == {"10.1.0.1", "10.1.0.2"})
        await world.step("the rights are taken away", patch(ROLE, {"rules": []}), cut=True)
        await until(lambda: 'cannot list resource "pods" in API group ""' in source.trouble)
        assert hosts(source) == {"10.1.0.1", "10.1.0.2"}
        rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
        await world.step("and given back", patch(ROLE, {"rules": [rule]}))
        await until(lambda: not source.trouble)
        await world.step("a pod comes", run("w-3", "10.1.0.4"))
        await until(lambda: len(hosts(source)) == 3)


async def refusals(world: World) -> None:
    """What else a server may say, in the order of `REFUSALS`."""
    await world.step("a pod", run("w-0", "10.1.0.1"))
    async with httpx.AsyncClient(
        base_url=world.url, headers=bearer(world), timeout=PATIENCE_S
    ) as client:

        async def asked(path: str, **query: str) -> httpx.Response:
            return await client.get(path, params=query)

        assert (await asked(PODS, resourceVersion="99999999")).status_code == 504
        assert (await asked(SLICES)).status_code == 404
        assert (await asked(PODS, limit="1", **{"continue": "nonsense"})).status_code == 400
        await world.step("a server that takes one request at a time", busy)
        nothing = {"labelSelector": "app=none"}
        codes = [
            one.status_code
            for one in await asyncio.gather(*(asked(PODS, **nothing) for _ in range(24)))
        ]
        assert set(codes) == {200, 429}


def busy(admin: Admin) -> None:
    admin.cluster.stop("kube-apiserver")
    admin.cluster.start_server("--enable-priority-and-fairness=false", "--max-requests-inflight=1")


DISCOVERY: Final[dict[str, Scenario]] = {
    "pods": pods,
    "slices": slices,
    "end_of_a_watch": end_of_a_watch,
    "gone": gone,
    "expired_pages": expired_pages,
    "outage": outage,
    "restored": restored,
    "rights": rights,
    "refusals": refusals,
}
