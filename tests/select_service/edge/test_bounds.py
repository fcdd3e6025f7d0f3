"""Every cap at one less, at itself, and at one more; crossing it costs who crosses it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from indexer.errors import EndpointRefused
from select_service.edge.driver.driver import Driver
from select_service.edge.embedded import SelectionService
from select_service.errors import TooManyReservations
from select_service.types import (
    CoreLimits,
    ReservationRequest,
    SelectAndReserveRequest,
    Selection,
    WorkerSpec,
)
from tests.coroutines import within
from tests.live.ports import free_port
from tests.select_service.edge.serving import add_worker, app_client, listening, worker
from tests.wait import SCENARIO_S, until

ROOT = Path(__file__).resolve().parents[3]


def hashes(count: int) -> dict[str, Any]:
    values = list(range(count))
    return {"block_hashes": values, "sequence_hashes": values, "isl_tokens": 16 * count + 1}


def booking(name: str, **fields: Any) -> dict[str, Any]:
    return {"reservation_id": name, "worker_id": 1, **hashes(1), **fields}


async def statuses(
    method: str, path: str, bodies: list[dict[str, Any]], status: int, **settings: Any
) -> list[dict[str, Any]]:
    """Ask in turn: all but the last are fine, that one is refused. Returns all answers."""
    answers: list[dict[str, Any]] = []
    async with app_client(**settings) as (client, service):
        add_worker(service)
        for body in bodies:
            answer = await client.request(method, path, json=body)
            is_last = body is bodies[-1]
            assert (answer.status_code == status) is is_last, (answer.status_code, answer.text)
            assert answer.status_code < 300 or is_last
            answers.append(answer.json())
        assert (await client.get("/ready")).status_code == 200, "the others are served"
        service.core.check()
    return answers


@pytest.mark.parametrize(
    ("path", "prompts", "field"),
    [
        ("/select", [hashes(n) for n in (7, 8, 9)], "block_hashes"),
        ("/select", [{"token_ids": [1] * n} for n in (127, 128, 129)], "token_ids"),
        (
            "/select",
            [{"mm_routing_info": {"routing_token_ids": [1] * n}} for n in (127, 128, 129)],
            "token_ids",
        ),
        ("/select_and_reserve", [hashes(n) for n in (7, 8, 9)], "block_hashes"),
        ("/potential_loads", [hashes(n) for n in (7, 8, 9)], "block_hashes"),
        ("/overlap_scores", [{"token_ids": [1] * n} for n in (127, 128, 129)], "token_ids"),
        ("/reservations", [booking(f"r{n}", **hashes(n)) for n in (7, 8, 9)], "sequence_hashes"),
    ],
)
async def test_tokens_of_a_prompt(path: str, prompts: list[dict[str, Any]], field: str) -> None:
    *_, refused = await statuses("POST", path, prompts, 422, tokens_per_request_max=8 * 16)
    assert (refused["code"], refused["field"]) == ("too_many_tokens", field)


@pytest.mark.parametrize("field", ["reservation_id", "selection_id"])
@pytest.mark.parametrize("path", ["/reservations", "/select_and_reserve"])
@pytest.mark.parametrize("last", ["\N{SNOWMAN}" * 9, "a\nb", "\x1b[31m", "\x00", "\u202e"])
async def test_ids(field: str, path: str, last: str) -> None:
    fine = ["", "a/b c", "../x", "\N{SNOWMAN}" * 7, "\N{SNOWMAN}" * 8]
    made = [booking(f"r{at}") | {field: name} for at, name in enumerate([*fine, last])]
    *_, refused = await statuses("POST", path, made, 422, id_length_max=8)
    assert refused["field"] == field


@pytest.mark.parametrize("field", ["lora_name", "fairness_id"])
@pytest.mark.parametrize("last", ["n" * 9, "a\tb"])
async def test_names_of_a_booking(field: str, last: str) -> None:
    made = [hashes(1) | {field: name} for name in ("", "n" * 7, "n" * 8, last)]
    *_, refused = await statuses("POST", "/select_and_reserve", made, 422, name_length_max=8)
    assert refused["field"] == field


@pytest.mark.parametrize("field", ["model_name", "tenant_id", "routing_group"])
@pytest.mark.parametrize("last", ["n" * 9, "a\nb"])
async def test_names_of_a_scope(field: str, last: str) -> None:
    made = [worker(at, **{field: name}) for at, name in enumerate(["", "n" * 7, "n" * 8, last], 2)]
    *_, refused = await statuses("POST", "/workers", made, 422, name_length_max=8)
    assert refused["field"] == field


@pytest.mark.parametrize("name", ["a\nb", "n" * 9])
@pytest.mark.parametrize("field", ["lease_id", "owner"])
async def test_names_of_a_lease(field: str, name: str) -> None:
    lease = {"owner": "o", "lease_id": "l", "ttl_s": 5}
    made = [lease, lease | {"lease_id": "k" * 8}, lease | {"lease_id": "m", field: name}]
    *_, refused = await statuses("POST", "/leases", made, 422, lease_name_length_max=8)
    assert refused["field"] == field


async def test_workers() -> None:
    made = [worker(2), worker(3), worker(3, taints=["a"]), worker(4)]
    *_, refused = await statuses("POST", "/workers", made, 409, workers_max=3)
    assert refused["code"] == "too_many_workers"


async def test_records_of_workers() -> None:
    size = len(msgspec.msgpack.encode(msgspec.convert(worker(2, taints=[""]), WorkerSpec)))
    made = [worker(at, taints=["x" * more]) for at, more in ((2, 9), (3, 10), (4, 11))]
    await statuses("POST", "/workers", made, 422, worker_bytes_max=size + 10)


async def test_ranks_of_a_worker() -> None:
    made = [
        worker(2, data_parallel_size=size, kv_events_endpoints={"0": "tcp://127.0.0.1:9"})
        for size in (7, 8, 9)
    ]
    await statuses("POST", "/workers", made, 400, data_parallel_size_max=8)


@within(app_client, scopes_max=3)
async def test_scopes(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service, 1)
    records = []
    for number in (2, 3, 4):
        answer = await client.post("/workers", json=worker(number, model_name=f"m{number}"))
        records.append(answer.json())
    assert [one["lifecycle"] for one in records] == ["schedulable", "schedulable", "incomplete"]
    (reason,) = records[-1]["not_schedulable_reasons"]
    assert "--scopes-max" in reason
    assert (await client.post("/workers", json=worker(5))).json()["lifecycle"] == "schedulable"
    assert 'limit_hits_total{name="scopes_max"} 1.0' in (await client.get("/metrics")).text


async def test_reservations() -> None:
    made = [booking(name) for name in ("a", "b", "b", "c")]
    *_, refused = await statuses("POST", "/reservations", made, 503, reservations_max=2)
    assert refused["code"] == "too_many_reservations"
    made = [hashes(1) for _ in range(3)]
    await statuses("POST", "/select_and_reserve", made, 503, reservations_max=2)


async def test_reservations_that_are_waited_for_count() -> None:
    limits = CoreLimits(reservations_max=2)
    async with SelectionService(limits=limits) as service:
        spec = msgspec.convert(worker(1, max_inflight=1), WorkerSpec)
        await service.upsert_worker(spec)
        request = msgspec.convert(booking("a"), ReservationRequest)
        await service.reserve(request)
        core = service.driver.core
        body = msgspec.convert(hashes(1), SelectAndReserveRequest)
        waits = asyncio.ensure_future(service.select_and_reserve(body))
        while not core.queries.loads()[0].pending_count:
            await asyncio.sleep(0)
        with pytest.raises(TooManyReservations):
            await service.reserve(msgspec.convert(booking("b"), ReservationRequest))
        await service.free("a")
        answer = await waits
        assert isinstance(answer, Selection)
        assert core.lifecycle.bookings.expected == 1
        await service.free(str(answer.reservation_id))
        assert core.lifecycle.bookings.expected == 0


async def test_leases() -> None:
    made = [{"owner": "o", "lease_id": name, "ttl_s": 5} for name in ("a", "b", "b", "c")]
    await statuses("POST", "/leases", made, 503, leases_max=2)


async def test_operations_of_a_batch() -> None:
    one = {"op": "free", "reservation_id": "x"}
    made = [{"operations": [one] * count} for count in (2, 3, 4)]
    await statuses("POST", "/reservations/batch", made, 422, batch_operations_max=3)


@pytest.mark.parametrize("bracket", ["[]", "{}"])
@within(app_client, json_depth_max=8)
async def test_depth_of_a_body(client: httpx.AsyncClient, service: Driver, *, bracket: str) -> None:
    add_worker(service)
    for depth, status in ((7, 200), (8, 200), (9, 400), (100_000, 400)):
        inner = depth - 2  # within the body and the array of the field
        opening = '{"a":' if bracket == "{}" else "["
        text = opening * inner + "1" + bracket[1] * inner
        body = f'{{"token_ids": [1], "unknown": ["[[[[[[[[\\"[[{{", {text}]}}'
        headers = {"content-type": "application/json"}
        answer = await client.post("/select", content=body, headers=headers)
        assert answer.status_code == status, (depth, answer.text)


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


JSON, MSGPACK = "application/json", "application/msgpack"


def parts(count: int) -> bytes:
    """A body of so many strings and objects."""
    return msgspec.json.encode({"token_ids": [1], "odd": ["x"] * (count - 5)})


def with_media(size: int) -> bytes:
    """An array of objects of at least so many bytes, packed."""
    return packed({"token_ids": [1] * 16, "block_mm_infos": [None] * (size - 3)})


@pytest.mark.parametrize(
    ("limit", "most", "path", "form", "made", "status"),
    [
        ("body_parts_max", 100, "/select", JSON, parts, 422),
        (
            *("body_parts_max", 100, "/select", MSGPACK),
            *(lambda n: packed({str(at): 1 for at in range(n - 1)} | {"token_ids": [1]}), 422),
        ),
        (
            *("body_numbers_max", 100, "/select", JSON),
            *(lambda n: msgspec.json.encode({"token_ids": [11] * (n + 1)}), 422),  # by commas
        ),
        (
            *("body_numbers_max", 100, "/select", MSGPACK),
            *(lambda n: packed({"token_ids": [70_000] * n}), 422),
        ),
        (
            *("body_short_bytes_max", 200, "/reservations/batch", JSON),
            *(lambda n: b'{"operations":[]' + b" " * (n - 17) + b"}", 413),
        ),
        (
            *("body_unknown_bytes_max", 200, "/select", MSGPACK),
            *(lambda n: packed({"token_ids": [1], "odd": [1] * (n - 3)}), 422),
        ),
        ("body_media_bytes_max", 200, "/select", MSGPACK, with_media, 422),
        (
            *("json_depth_max", 8, "/select", JSON),
            *(lambda n: b'{"token_ids":[1],"odd":%b1%b}' % (b"[" * (n - 1), b"]" * (n - 1)), 400),
        ),
        (
            *("max_body_bytes", 200, "/select", JSON),
            *(lambda n: b'{"token_ids":[1]' + b" " * (n - 17) + b"}", 413),
        ),
    ],
)
async def test_what_a_body_may_hold(
    limit: str, most: int, path: str, form: str, made: Callable[[int], bytes], status: int
) -> None:
    """Refused with the limit in the text where it can be, counted, and changed under way."""
    async with app_client(**{limit: most}) as (client, service):
        add_worker(service)

        async def ask(size: int) -> httpx.Response:
            return await client.post(path, content=made(size), headers={"content-type": form})

        async def hits() -> float:
            text = (await client.get("/metrics")).text
            name = f'select_service_limit_hits_total{{name="{limit}"}} '
            return float(text.partition(name)[2].partition("\n")[0])

        for size in (most - 1, most):
            assert (await ask(size)).status_code == 200, (await ask(size)).text
        assert await hits() == 0
        refused = await ask(most + 1)
        assert refused.status_code == status
        assert str(most) in refused.json()["error"]
        assert await hits() == 1
        raised = await client.put("/config", json={"settings": {limit: most + 1}})
        assert raised.status_code == 200, raised.text
        assert (await ask(most + 1)).status_code == 200
        assert (await ask(most + 2)).status_code == status


async def test_names_that_are_too_long_are_counted_by_their_limit() -> None:
    names = dict.fromkeys(("id_length_max", "name_length_max", "lease_name_length_max"), 8)
    chosen = {**names, "batch_operations_max": 8, "batch_samples_max": 8, "session_ttl_s": 60.0}
    async with app_client(**chosen) as (client, service):
        add_worker(service)
        one = {"op": "free", "reservation_id": "x"}
        for path, body in (
            ("/reservations", booking("n" * 9)),
            ("/select", {**hashes(1), "session_id": "n" * 9}),
            ("/workers", worker(2, model_name="n" * 9)),
            ("/leases", {"owner": "n" * 9, "ttl_s": 5}),
            ("/reservations/batch", {"operations": [one] * 9}),
            ("/select_batch", {"requests": [hashes(1)] * 9}),
            ("/reservations", booking("\n")),  # not for its length
            ("/leases", {"owner": "", "ttl_s": 5}),
        ):
            assert (await client.post(path, json=body)).status_code == 422, path
        text = (await client.get("/metrics")).text
        for name, count in (
            *(("id_length_max", 2), ("name_length_max", 1), ("lease_name_length_max", 1)),
            *(("batch_operations_max", 1), ("batch_samples_max", 1)),
        ):
            assert f'limit_hits_total{{name="{name}"}} {float(count)}' in text


async def test_connections_from_one_address() -> None:
    async with listening(connections_per_address_max=2) as (port, _, server):
        counts = server._counts

        async def ask(host: str = "127.0.0.1") -> tuple[asyncio.StreamWriter, bytes]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
            writer.write(b"GET /loads HTTP/1.1\r\nhost: s\r\n\r\n")
            return writer, (await reader.readline())[:12]

        first, one = await ask()
        second, two = await ask()
        third, three = await ask()
        other, four = await ask("127.0.0.2")
        assert [one, two, three, four] == [
            *(b"HTTP/1.1 200", b"HTTP/1.1 200"),
            *(b"HTTP/1.1 503", b"HTTP/1.1 200"),
        ]
        assert counts.refused_by_address == 1
        third.close()  # else the server lingers
        await until(lambda: counts.by_address.get("127.0.0.1") == 2)
        first.close()
        await until(lambda: counts.by_address.get("127.0.0.1") == 1)
        again, five = await ask()
        assert five == b"HTTP/1.1 200"
        for writer in (second, other, again):
            writer.close()
        await until(lambda: not counts.by_address)


async def test_replica_peers_are_refused_where_nobody_may_go() -> None:
    async with (
        listening(replica_sync_port=free_port(), replica_peers_max=2) as (port, _, _server),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):

        async def register(endpoint: str) -> httpx.Response:
            body = {"endpoint": endpoint}
            return await client.post("/replica_sync/register_peer", json=body)

        refused = await register("tcp://169.254.169.254:80")
        assert (refused.status_code, refused.json()["field"]) == (400, "endpoint")
        assert "169.254.0.0/16" in refused.json()["details"]["reason"]
        assert (await register("ipc:///etc/passwd")).status_code == 201
        assert (await register("tcp://nohost-xyz:1")).status_code == 201
        assert (await register("tcp://127.0.0.1:1")).status_code == 409
        text = (await client.get("/metrics")).text
        assert 'connect_refused_total{reason="scheme"} 1.0' in text


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://169.254.169.254:80", "tcp://[fe80::1]:80", "ipc:///etc/passwd", "inproc://x"],
)
@within(app_client)
async def test_event_sources_where_nobody_may_go_put_the_worker_out(
    client: httpx.AsyncClient, service: Driver, *, endpoint: str
) -> None:
    add_worker(service)
    for number, fields in enumerate(
        ({"kv_events_endpoint": endpoint}, {"replay_endpoint": endpoint}), 2
    ):
        answer = await client.post("/workers", json=worker(number, **fields))
        assert (answer.status_code, answer.json()["lifecycle"]) == (201, "incomplete")
        assert endpoint in answer.json()["not_schedulable_reasons"][0]
    assert service.ready().schedulable_workers == 1


@within(app_client)
async def test_a_worker_whose_name_leads_where_nobody_may_go(
    client: httpx.AsyncClient, service: Driver
) -> None:
    service.addresses._look_up = lambda _: ["169.254.169.254"]
    body = worker(1, kv_events_endpoint="tcp://metadata.test:80")
    answer = await client.post("/workers", json=body)
    assert answer.json()["lifecycle"] == "schedulable", "registering waits for no name"
    await until(lambda: not service.ready().schedulable_workers)
    (record,) = service.workers()
    assert "--connect-deny" in str(record.not_schedulable_reasons)
    assert service.addresses.refused["resolved"] == 1


@within(app_client)
async def test_an_end_that_is_refused_stays_refused_after_a_patch(
    client: httpx.AsyncClient, service: Driver
) -> None:
    await client.post("/workers", json=worker(1))
    body = {"kv_events_endpoint": "tcp://169.254.169.254:80"}
    answer = await client.patch("/workers/1", json=body)
    assert answer.json()["lifecycle"] == "incomplete"
    with pytest.raises(EndpointRefused):
        service.addresses.place(body["kv_events_endpoint"])


# -- what was taken is given back ----------------------------------------------------------------


@within(app_client)
async def test_empty_scopes_are_given_up_and_stay_pinned(
    client: httpx.AsyncClient, service: Driver
) -> None:
    core = service.core
    now = 1000.0
    for number in range(20):
        add_worker(service, number, model_name=f"m{number}")
    core.tick(now)
    for number in range(1, 20):
        service.delete_worker(number)
    for _ in range(50):
        now += 11.0
        core.tick(now)
    assert len(core.partitions) == 20, "they linger"
    now += core.limits.scope_linger_s
    for _ in range(3):
        now += 11.0
        core.tick(now)
    assert list(core.partitions) == [("m0", "default")]
    assert len(list(core.registry.indexes())) == 1
    assert core.membership.scopes_closed == 19
    refused = await client.post("/select", json=hashes(1) | {"model_name": "m3"})
    assert refused.status_code == 503
    other = await client.post("/workers", json=worker(3, model_name="m3", block_size=32))
    assert other.json()["lifecycle"] == "schedulable"
    again = await client.post("/workers", json=worker(3, model_name="m3"))
    assert again.json()["lifecycle"] == "schedulable"
    answer = await client.post("/select", json=hashes(1) | {"model_name": "m3"})
    assert answer.status_code == 200
    core.check()


@pytest.mark.slow
def test_memory_of_many_scopes_comes_back() -> None:
    command = [sys.executable, "-m", "tests.select_service.edge.come_and_go", "5"]
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT, timeout=SCENARIO_S)
    first, *_, last = (msgspec.json.decode(line) for line in done.stdout.splitlines())
    assert last["objects"] < first["objects"] + 500, "nothing is left of five thousand"
    assert last["bytes"] < first["bytes"] + (5 << 20)
