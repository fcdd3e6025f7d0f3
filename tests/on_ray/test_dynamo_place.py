"""Ray Serve LLM's own KV-aware router and tracker, unmodified, with ours in Dynamo's place.

Its tracker builds `dynamo.llm.SelectionService`, which the cluster's setup hook provides; nothing
of ai-dynamo is installed. Ray's classes come out of its wheel, only their subscription to Serve's
controller is left out: tests set which replicas there are.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from select_service.compat.selection_service import SelectionService
from select_service.demo.encoding import StoredBlocks, encode_batch
from select_service.demo.worker import EventPublisher
from tests.on_ray.cluster import Cluster
from tests.wait import POLL_S, run, until

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="ray.llm needs pyarrow: make test-ray"
)

BLOCK = 16
PROMPT = list(range(4 * BLOCK))


def tracker(rank: int = 0) -> Any:
    """Ray's tracker, of one ingress replica."""
    from ray.llm._internal.serve.routing_policies.kv_aware.kv_token_tracker import KVTokenTracker

    class TrackerWithReplicas(KVTokenTracker):  # type: ignore[misc]
        def _start_replica_tracking(self) -> None:
            pass

    from select_service.compat.dynamo import install

    install()
    made = TrackerWithReplicas(ingress_replica_rank=rank)
    assert isinstance(made._svc, SelectionService)
    return made


def replica(name: str, publisher: EventPublisher | None) -> Any:
    """A replica as Serve's controller describes it."""
    from ray.serve._private.common import DeploymentID, ReplicaID, RunningReplicaInfo

    endpoint = "tcp://127.0.0.1:9" if publisher is None else publisher.endpoint
    events = {
        "endpoint": endpoint,
        "block_size": BLOCK,
        "max_num_batched_tokens": 8192,
        "dp_rank": 0,
        "replay_endpoint": None if publisher is None else publisher.replay_endpoint,
    }
    return RunningReplicaInfo(
        replica_id=ReplicaID(unique_id=name, deployment_id=DeploymentID(name="llm", app_name="a")),
        node_id="n",
        node_ip="127.0.0.1",
        availability_zone=None,
        actor_name=name,
        max_ongoing_requests=10,
        routing_stats={"kv_event_metadata": events},
    )


def set_replicas(trackers: list[Any], *replicas: Any) -> None:
    from ray.serve._private.common import DeploymentTargetInfo

    for one in trackers:
        one._on_deployment_targets(
            DeploymentTargetInfo(is_available=True, running_replicas=list(replicas))
        )


def worker_id(name: str) -> int:
    from ray.llm._internal.serve.routing_policies.kv_aware.kv_token_tracker import get_worker_id

    return int(get_worker_id(name))


def loads(one: Any) -> dict[int, list[int]]:
    names = ("potential_prefill_tokens", "potential_decode_blocks", "active_requests")
    return {
        row["worker_id"]: [row[name] for name in names]
        for scope in one._svc.loads()
        for row in scope["loads"]
    }


def is_known(one: Any, *names: str) -> bool:
    known = {
        row["worker_id"] for row in one._svc.list_workers() if row["lifecycle"] == "schedulable"
    }
    return known == {worker_id(name) for name in names}


class Handle:
    """Serve's handle of the ingress deployment: what is broadcast reaches every tracker."""

    def __init__(self, trackers: list[Any]) -> None:
        self._trackers = trackers

    def broadcast(self, method: str, *args: Any) -> Handle:
        self._call = method, args
        return self

    async def results_async(self, **_: Any) -> list[Any]:
        method, args = self._call
        return [await getattr(one, method)(*args) for one in self._trackers]


@asynccontextmanager
async def ingresses(count: int) -> AsyncIterator[list[Any]]:
    """So many ingress replicas, each with a tracker and a selection service of its own."""
    trackers = [tracker(rank) for rank in range(count)]
    handle = Handle(trackers)
    for one in trackers:
        one.start_reservation_broadcast(handle)
    try:
        yield trackers
    finally:
        for one in trackers:
            one._reservation_forwarder.close()
            if one._reservation_apply_task is not None:
                one._reservation_apply_task.cancel()
            await one._svc.shutdown_async()


async def settled(chooser: Any, trackers: list[Any]) -> None:
    """Return once every ingress has booked what one has chosen."""
    await chooser._reservation_forwarder.flush()
    for one in trackers:
        await one._reservation_updates.join()


def test_ingress_replicas_stay_in_step_by_rays_broadcast() -> None:
    async def play() -> None:
        async with ingresses(3) as trackers:
            set_replicas(trackers, replica("a", None), replica("b", None))
            for one in trackers:
                await until(lambda one=one: is_known(one, "a", "b"))  # type: ignore[misc]
            both = [worker_id("a"), worker_id("b")]
            for number in range(9):
                chooser = trackers[number % 3]
                tokens = list(range(100 * number, 100 * number + 40))
                await chooser.select_worker(f"r{number}", tokens, both, 64)
                await settled(chooser, trackers)
            loads_seen = [loads(one) for one in trackers]
            assert loads_seen[0] == loads_seen[1] == loads_seen[2]
            assert sum(row[2] for row in loads_seen[0].values()) == 9
            assert {row[2] for row in loads_seen[0].values()} == {4, 5}  # spread by load
            computed = [("on_prefill_complete", (f"r{number}",)) for number in range(9)]
            for one in trackers:
                await one.on_lifecycle_events(computed)
                await one.on_lifecycle_events([("on_decode_progress", ("r0", 20))])
            loads_seen = [loads(one) for one in trackers]
            assert loads_seen[0] == loads_seen[1] == loads_seen[2]
            assert all(row[0] == 0 for row in loads_seen[0].values())
            for one in trackers:
                await one.on_lifecycle_events(
                    [("on_request_completed", (f"r{number}",)) for number in range(9)]
                )
                assert all(row == [0, 0, 0] for row in loads(one).values())

    run(play())


def test_a_replica_that_goes_takes_its_load_along() -> None:
    async def play() -> None:
        async with ingresses(1) as (one,):
            set_replicas([one], replica("a", None), replica("b", None))
            await until(lambda: is_known(one, "a", "b"))
            await one.select_worker("r", PROMPT, [worker_id("a")])
            assert loads(one)[worker_id("a")][2] == 1
            set_replicas([one], replica("b", None))
            await until(lambda: is_known(one, "b"))
            assert set(loads(one)) == {worker_id("b")}
            chosen = await one.select_worker("s", PROMPT, [worker_id("b")])
            assert chosen["worker_id"] == worker_id("b")
            with pytest.raises(Exception, match="no endpoints available"):
                await one.select_worker("t", PROMPT, [worker_id("a")])

    run(play())


def test_rays_router_sends_a_prompt_where_its_prefix_is() -> None:
    async def play() -> None:
        from ray.llm._internal.serve.routing_policies.kv_aware import kv_token_tracker
        from ray.llm._internal.serve.routing_policies.kv_aware.kv_aware_router import KVAwareRouter
        from ray.serve._private.common import RequestMetadata
        from ray.serve._private.request_router import PendingRequest

        publisher = EventPublisher()
        async with ingresses(1) as (one,):
            kv_token_tracker.set_kv_token_tracker(one)
            try:
                router = KVAwareRouter.__new__(KVAwareRouter)
                router.initialize_state()
                candidates = [replica("a", None), replica("b", publisher)]
                set_replicas([one], *candidates)
                await until(lambda: is_known(one, "a", "b"))
                stored = StoredBlocks((1, 2, 3, 4), None, tuple(PROMPT))
                batch = encode_batch(1.0, [stored], block_size=BLOCK)

                async def held() -> Any:
                    scores = await one._svc.overlap_scores({"token_ids": PROMPT})
                    return max(row["device_blocks"] for row in scores["workers"])

                while await held() < 4:
                    publisher.publish(batch)
                    await asyncio.sleep(POLL_S)
                for number in range(3):
                    request = PendingRequest(
                        args=[],
                        kwargs={"request_token_ids": PROMPT + [7] * number},
                        metadata=RequestMetadata(f"q{number}", f"i{number}"),
                    )
                    groups = await router.choose_replicas(candidates, request)
                    assert [[found.actor_name for found in group] for group in groups] == [["b"]]
            finally:
                kv_token_tracker.set_kv_token_tracker(None)
                publisher.close()

    run(play())


def test_the_setup_hook_provides_it_in_every_process(cluster: Cluster) -> None:
    import ray

    @ray.remote(num_cpus=0)
    def provided() -> str:
        from dynamo.llm import SelectionService  # type: ignore[import-not-found]

        return str(SelectionService.__module__)

    assert ray.get(provided.remote()) == "select_service.compat.selection_service"
