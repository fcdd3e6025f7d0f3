"""The shared topology as machines of their own: every replica is exchanged under load.

Each replica, and the engines, have a network namespace on one switch; an API server that is ours
names them, as Kubernetes would. Clients ask like through a ClusterIP: a new connection leads to
some replica that was ready a moment ago, and is kept for as long as that one keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest

from tests.e2e.stage import BLOCK_SIZE
from tests.faults.engine import PROMPTS, Engine
from tests.faults.namespaces import Network, command_in, why_not
from tests.live.replicas import Replica, agree
from tests.live.window import WATCHED
from tests.select_service.edge.discovery.fake_kubernetes import FakeKubernetes, pod
from tests.wait import eventually

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

T = TypeVar("T")
HTTP, SYNC = 8092, 9092
NEWS_S = 0.5
"""How long after a replica has said that it leaves some are still led to it."""

NOTICE_S = 1.5
CLIENTS = 6
STREAMS = 12  # that last from before the roll till after it
FLAGS = (
    *("--port", str(HTTP), "--kubernetes-workers", "app=vllm"),
    *("--kubernetes-replicas", "kubernetes.io/service-name=select-service-peers"),
    *("--leave-notice-s", str(NOTICE_S), "--leave-grace-s", "2"),
    *("--replica-heartbeat-s", "0.2", "--replica-output-interval-s", "0.2"),
    *("--discovery-grace-s", "1"),
)


class Api:
    """The API server, on a loop of its own."""

    def __init__(self, host: str) -> None:
        self.objects = FakeKubernetes()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._serving = self.objects.serving(host=host)

    def __enter__(self) -> Self:
        self._thread.start()
        self.do(self._serving.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        await self._serving.__aexit__(None, None, None)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)  # those who served connections that are gone

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry it out, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


class Cluster:
    """Replicas, who is ready of them, and where that is sent."""

    def __init__(self, network: Network, api: Api, folder: Path) -> None:
        self.network, self.api, self.folder = network, api, folder
        self.replicas: list[Replica] = []
        self.ready: list[Replica] = []  # where the ClusterIP leads
        self._started = 0

    def start(self) -> Replica:
        """A new pod: named before it is ready, asked when it is."""
        namespace, address = self.network.host()
        self._started += 1
        replica = Replica(
            self.folder / f"replica-{self._started}",
            command=(*command_in(namespace), *WATCHED),
            args=(*FLAGS, "--host", address, "--kubernetes-api", self.api.objects.url),
            env={"POD_IP": address},
            port=HTTP,
            replica_port=SYNC,
            host=address,
        )
        self.replicas.append(replica)
        self.publish()
        replica.__enter__()
        eventually(lambda: replica.request("GET", "/ready").status, 200)
        self.ready = [*self.ready, replica]
        return replica

    def end(self, replica: Replica) -> None:
        """As a kubelet does: terminating, a signal, and forgotten when it has ended."""
        self.publish(terminating=replica)
        assert replica.process is not None
        replica.process.send_signal(signal.SIGTERM)
        eventually(lambda: replica.request("GET", "/ready").status, 503)
        time.sleep(NEWS_S)
        self.ready = [one for one in self.ready if one is not replica]
        assert replica.process.wait(20) == 0
        self.replicas.remove(replica)
        self.publish()

    def publish(self, terminating: Replica | None = None) -> None:
        """Name the replicas, ready or not."""
        endpoints = [
            {
                "addresses": [one.host],
                "conditions": {"ready": True, "terminating": one is terminating},
            }
            for one in self.replicas
        ]
        ports = [{"name": "replica-sync", "port": SYNC}]
        put = self.api.objects.put("endpointslices", "peers", endpoints=endpoints, ports=ports)
        self.api.do(put)


class Caller(threading.Thread):
    """Asks one lifecycle after the other; whatever is no success is kept."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        super().__init__()
        self.failed: list[str] = []
        self.done = self.moved = 0
        self._cluster, self._number = cluster, number
        self._dice = random.Random(number)
        self._enough = threading.Event()
        self._connection: http.client.HTTPConnection | None = None

    def stop(self) -> None:
        self._enough.set()
        self.join(30)

    def run(self) -> None:
        try:
            while not self._enough.is_set():
                name = f"c{self._number}-{self.done}"
                self._call("POST", "/select_and_reserve", self._ask(name))
                time.sleep(self._dice.uniform(0.02, 0.1))  # the prompt is computed
                self._call("POST", f"/reservations/{name}/prefill_complete")
                self._call("POST", f"/reservations/{name}/output_block", {})
                time.sleep(self._dice.uniform(0.02, 0.1))
                self._call("DELETE", f"/reservations/{name}")
                self.done += 1
        except Exception as error:  # noqa: BLE001 - whatever it was, the request has failed
            self.failed.append(repr(error))
        if self._connection is not None:
            self._connection.close()

    def _ask(self, name: str) -> object:
        return {"reservation_id": name, "token_ids": self._dice.choice(PROMPTS)}

    def _call(self, method: str, path: str, body: object = None) -> None:
        connection = self._connection
        if connection is None:
            replica = self._dice.choice(self._cluster.ready)
            connection = http.client.HTTPConnection(replica.host, HTTP, timeout=10)
            self._connection = connection
            self.moved += 1
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        said = answer.read()
        if answer.will_close:
            connection.close()
            self._connection = None
        if answer.status >= 300:
            self.failed.append(f"{method} {path}: {answer.status} {said.decode()[:200]}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if why := why_not():
        pytest.skip(why)
    with Network() as network, Api(network.here) as api, contextlib.ExitStack() as stack:
        namespace, address = network.host()
        for worker_id in (1, 2):
            engine = Engine(worker_id, host=address, namespace=namespace)
            stack.enter_context(engine)
            events, replay = (int(one.rpartition(":")[2]) for one in engine.endpoints)
            said = pod(
                address,
                worker_id=str(worker_id),
                block_size=str(BLOCK_SIZE),
                kv_events_port=str(events),
                kv_replay_port=str(replay),
                max_num_batched_tokens=str(1 << 40),
            )
            api.do(api.objects.put("pods", f"w-{worker_id}", **said))
            engine.run(20)
        cluster = Cluster(network, api, tmp_path)
        try:
            yield cluster
        finally:
            for one in cluster.replicas:
                if one.process is not None:
                    one.process.send_signal(signal.SIGINT)
                    one.stop()


def test_every_replica_is_exchanged_under_load(cluster: Cluster) -> None:
    first = [cluster.start() for _ in range(3)]
    for one in first:
        eventually(lambda: one.metric("replica_publishers", state="synced"), 2.0)
    callers = [Caller(cluster, number) for number in range(CLIENTS)]
    for number in range(STREAMS):
        booked = {"reservation_id": f"stream-{number}", "token_ids": PROMPTS[number]}
        first[number % 3].ask("POST", "/select_and_reserve", booked)
    for caller in callers:
        caller.start()
    try:
        for replica in first:
            cluster.start()
            cluster.end(replica)
    finally:
        for caller in callers:
            caller.stop()

    assert [failure for caller in callers for failure in caller.failed] == []
    assert sum(caller.done for caller in callers) > 50
    assert not {one.host for one in cluster.replicas} & {one.host for one in first}
    # what is left is what lasted, wherever it was booked, with all that stayed
    agree(cluster.replicas)
    for one in cluster.replicas:
        assert one.metric("replica_publishers", state="synced") == 2
        assert {booking.name for booking in one.view().booked} == {
            f"stream-{number}" for number in range(STREAMS)
        }
    for number in range(STREAMS):
        one = cluster.replicas[number % 3]
        one.ask("POST", f"/reservations/stream-{number}/prefill_complete")
        one.ask("DELETE", f"/reservations/stream-{number}")
    for one in cluster.replicas:
        eventually(lambda: [one.load(1), one.load(2)], [(0, 0, 0)] * 2)
