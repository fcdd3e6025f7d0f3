"""cached_tokens over HTTP in every form, GET /trust, and what people and Prometheus see."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import msgspec
import pytest

from indexer.core.packing import pack_u64
from indexer.types import Scope, Tier, WorkerRank
from select_service.demo.encoding import StoredBlocks, encode_batch
from select_service.demo.worker import EventPublisher
from select_service.edge.driver.driver import Driver
from select_service.planner.edge.sources.selector_counters import parse
from select_service.planner.types import MOMENTS
from tests.coroutines import within
from tests.select_service.edge.http.test_api import problem
from tests.select_service.edge.metrics.test_exposition import SCOPE, names, scrape, value
from tests.select_service.edge.serving import Wire, add_worker, app_client, listening
from tests.wait import until

HASHES = [1, 2, 3, 4]
BODY: dict[str, Any] = {"block_hashes": HASHES, "sequence_hashes": HASHES, "isl_tokens": 70}
DONE = "/reservations/r/prefill_complete"


def hold(service: Driver, worker_id: int) -> None:
    index = service.core.partitions[Scope("default", "default")].index
    names = [1000 + one for one in HASHES]
    index.store(WorkerRank(worker_id, 0), Tier.DEVICE, None, names, pack_u64(HASHES))


async def book(client: httpx.AsyncClient, worker_id: int = 1, name: str = "r") -> None:
    body = BODY | {"reservation_id": name, "allowed_worker_ids": [worker_id]}
    answer = await client.post("/select_and_reserve", json=body)
    assert answer.status_code == 200, answer.text


def answer_for(service: Driver, seconds: float) -> None:
    """Let an answer take so long: of one that ends with its first token no speed is learnt."""
    clock = service._clock
    service._clock = lambda: clock() + seconds


async def row(client: httpx.AsyncClient, worker_id: int = 1) -> dict[str, Any]:
    ranks = (await client.get("/trust")).json()["ranks"]
    return next(one for one in ranks if one["worker_id"] == worker_id)


@within(app_client)
async def test_what_is_told_with_the_end_or_after_it(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service)
    hold(service, 1)
    await book(client)
    await client.delete("/reservations/r")
    wrong = await client.delete("/reservations/r?cached_tokens=-1")
    problem(wrong, 400, "invalid_query", "cached_tokens")
    wrong = await client.delete("/reservations/r?outcome=broken")
    problem(wrong, 400, "invalid_query", "outcome")
    answer = await client.delete("/reservations/r?cached_tokens=32&outcome=failed")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert (await row(client))["samples"] == 1
    await book(client)
    operation = {"op": "free", "reservation_id": "r", "cached_tokens": 0}
    answer = await client.post("/reservations/batch", json={"operations": [operation]})
    assert answer.json() == {"results": [{"status": 200}]}
    assert (await row(client))["samples"] == 2
    assert (await client.delete("/reservations/r?other=1")).status_code == 200


@within(app_client)
async def test_what_is_told_in_either_form_and_in_a_batch(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service)
    hold(service, 1)
    packed = msgspec.msgpack.encode({"cached_tokens": 32})
    for form in (
        {"json": {"cached_tokens": 32}},
        {"content": packed, "headers": {"content-type": "application/msgpack"}},
        {"content": b'{"cached_tokens": 32}'},
        {"content": b'{"cached_tokens": 32}', "headers": {"content-type": "text/plain"}},
    ):
        await book(client)
        answer = await client.post(DONE, **form)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        answer_for(service, 1.0)
        await client.delete("/reservations/r")
    await book(client)
    operation = {"op": "prefill_complete", "reservation_id": "r", "cached_tokens": 64}
    answer = await client.post("/reservations/batch", json={"operations": [operation]})
    assert answer.json() == {"results": [{"status": 200}]}
    answered = await row(client)
    assert answered.pop("speed")["prefill_tokens_per_s"] > 0
    assert answered == {
        "model_name": "default",
        "tenant_id": "default",
        "worker_id": 1,
        "dp_rank": 0,
        "trust": 1.0,
        "reasons": [],
        "prediction_error": pytest.approx(32 * 4 / 5),
        "missing_share": pytest.approx(0.38, abs=0.02),
        "samples": 5,
        "rereads": 0,
        "index": {
            "state": "silent",
            "lag_s": None,
            "open_gaps": 0,
            "lost_batches": 0,
            "unknown_batches": 0,
            "known_share": 1.0,
            "last_batch": None,
        },
    }
    assert (await client.get("/trust?tenant_id=other")).json() == {"ranks": []}


@within(app_client)
async def test_what_is_no_number_of_tokens_is_refused_and_named(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service)
    await book(client)
    for wrong in (-1, 71, 2**64, 1.5, "1", [1], True):
        answer = await client.post(DONE, json={"cached_tokens": wrong})
        problem(answer, 422, "invalid_field", "cached_tokens")
        operation = {"op": "prefill_complete", "reservation_id": "r", "cached_tokens": wrong}
        batch = await client.post("/reservations/batch", json={"operations": [operation]})
        assert "cached_tokens" in batch.text
    problem(await client.post(DONE, content=b'{"cached_tokens": '), 400, "invalid_json")
    assert (await client.get("/loads")).json()[0]["loads"][0]["potential_prefill_tokens"] == 70
    assert (await client.post(DONE, json={"cached_tokens": None})).status_code == 200
    assert (await row(client))["prediction_error"] is None


@within(app_client)
async def test_other_bodies_are_ignored_as_ever(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    await book(client)
    for content in (b"", b"{}", b'{"x": 1}', b"no json", b"\xff"):
        for kind in ({}, {"content-type": "application/json"}, {"content-type": "a/b"}):
            answer = await client.post(DONE, content=content, headers=kind)
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
            assert "warning" not in answer.headers
    answer = await client.post(DONE, json={"cached_tokens": 1, "x": 1})
    assert answer.headers["warning"] == '299 - "unknown field: x"'
    problem(
        await client.post("/reservations/nobody/prefill_complete", json={"cached_tokens": 1}),
        *(404, "reservation_not_found"),
    )


@within(listening)
async def test_on_the_wire_whole_and_in_chunks(port: int, service: Driver) -> None:
    add_worker(service)
    hold(service, 1)
    wire = await Wire.to(port)
    samples = 0
    for kind in ("content-type: application/json\r\n", "content-type: a/b\r\n", ""):
        for chunked in (False, True):
            body = BODY | {"reservation_id": "r"}
            assert await wire.status("POST", "/select_and_reserve", body) == 200
            said = b'{"cached_tokens":64}'
            head = f"POST {DONE} HTTP/1.1\r\nhost: s\r\n{kind}"
            if chunked:
                wire.say(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
                wire.say(b"%x\r\n%b\r\n0\r\n\r\n" % (len(said), said))
            else:
                wire.say(f"{head}content-length: {len(said)}\r\n\r\n".encode() + said)
            assert (await wire.answer())[0] == 200
            assert await wire.status("DELETE", "/reservations/r") == 200
            samples += 1
            assert service.trust().ranks[0].samples == samples


@pytest.mark.parametrize("said", [b"x" * 3000, b'{"cached_tokens":64}' + b" " * 3000])
@pytest.mark.parametrize("chunked", [False, True])
@within(listening, max_body_bytes=1000)
async def test_a_body_that_is_too_long_is_ignored_like_any_other(
    port: int, service: Driver, *, said: bytes, chunked: bool
) -> None:
    add_worker(service)
    wire = await Wire.to(port)
    assert await wire.status("POST", "/select_and_reserve", BODY | {"reservation_id": "r"}) == 200
    head = f"POST {DONE} HTTP/1.1\r\nhost: s\r\n"
    if chunked:
        wire.say(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        wire.say(b"%x\r\n%b\r\n0\r\n\r\n" % (len(said), said))
    else:
        wire.say(f"{head}content-length: {len(said)}\r\n\r\n".encode() + said)
    assert (await wire.answer())[0] == 200
    assert service.loads()[0].loads[0].potential_prefill_tokens == 0
    assert await wire.status("DELETE", "/reservations/r") == 200


async def test_people_and_prometheus_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "select_service"):
        async with app_client() as (client, service):
            for worker_id in (1, 2):
                add_worker(service, worker_id)
                hold(service, worker_id)
            for worker_id, found in ((1, 64), *[(2, 0)] * 8):
                await book(client, worker_id)
                answer_for(service, 1.0)  # beside which it is the same how busy this machine is
                assert (await client.post(DONE, json={"cached_tokens": found})).status_code == 200
                answer_for(service, 1.0)
                await client.delete("/reservations/r")
            service._carry_out(service.core.tick(service._clock())[1])
            service._carry_out(service.core.tick(service._clock())[1])
            samples = await scrape(client)
            for worker_id, factor, missing, error in ((1, 1.0, 0.0, 0.0), (2, 0.0, 1.0, 64.0)):
                labels = {"worker_id": worker_id, "dp_rank": 0, **SCOPE}
                assert value(samples, "trust_factor", **labels) == factor
                assert value(samples, "trust_missing_share", **labels) == missing
                assert value(samples, "trust_prediction_error_tokens", **labels) == error
                assert value(samples, "rank_prefill_tokens_per_second", **labels) > 0
            # of eight prompts of worker 2 the first four tell only what is an outlier
            counted = {
                moment: value(samples, "measured_prefill_moments_total", moment=moment, **SCOPE)
                for moment in MOMENTS
            }
            assert counted["count"] == 4
            assert counted["seconds"] > 0
            assert counted["tokens_squared"] * 4 >= counted["tokens"] ** 2 > 0
            assert value(samples, "trust_shrunk_ranks", reason="prediction") == 1
            assert value(samples, "trust_shrunk_ranks", reason="lag") == 0
            assert value(samples, "cached_tokens_told_total", outcome="compared") == 9
            assert value(samples, "index_rereads_total", outcome="no_replay") == 1
    lines = [one for one in caplog.records if "counts" in one.message]
    assert [one.message for one in lines] == ["a rank's index counts for less"]
    assert vars(lines[0])["worker_id"] == 2
    assert vars(lines[0])["reasons"] == "prediction"


@within(app_client)
async def test_prometheus_is_told_how_ranks_that_decode_were_measured(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service, 1, total_kv_blocks=500)
    add_worker(service, 2)
    scope = Scope("default", "default")
    speeds = service.core.partitions[scope].ledger.loads.speeds
    slots = service.core.partitions[scope].fleet_slots
    for worker_id in (1, 2):
        slot = slots.slot_of(WorkerRank(worker_id, 0))
        assert slot is not None
        for at in range(1, 7):
            seconds = speeds.decoded(slot, 356.0 * worker_id, 0.16, float(at))
            if seconds is not None:
                speeds.blocks.add(100.0 * worker_id, seconds)
    samples = await scrape(client)

    def moment_of(moment: str) -> float:
        return value(samples, "measured_itl_moments_total", moment=moment, **SCOPE)

    assert moment_of("count") == 2 * (6 - 4)
    assert moment_of("seconds") == pytest.approx(4 * 0.01)  # a block is 16 tokens
    assert moment_of("tokens") == pytest.approx(2 * 1600 + 2 * 3200)
    assert moment_of("tokens_squared") == pytest.approx(2 * 1600**2 + 2 * 3200**2)
    assert moment_of("token_seconds") == pytest.approx((2 * 1600 + 2 * 3200) * 0.01)
    assert value(samples, "measured_rank_kv_tokens", **SCOPE) == 8000  # of the one that reported
    assert value(samples, "measured_decode_worker_ranks", **SCOPE) == 1
    assert "select_service_measured_prefill_worker_ranks" not in names(samples)
    read = parse((await client.get("/metrics")).text, [SCOPE["model_name"]])  # as the planner does
    for moment in MOMENTS:
        assert read["measured_itl_moments_total", "default", "default", moment] == moment_of(moment)


@within(app_client)
async def test_ranks_that_only_compute_prompts_are_told_of_as_well(
    client: httpx.AsyncClient, service: Driver
) -> None:
    endpoints = {str(rank): f"tcp://127.0.0.1:{9 + rank}" for rank in range(4)}
    add_worker(service, total_kv_blocks=500, data_parallel_size=4, kv_events_endpoints=endpoints)
    partition = service.core.partitions[Scope("default", "default")]
    slot = partition.fleet_slots.slot_of(WorkerRank(1, 2))
    assert slot is not None
    for _ in range(4):
        partition.ledger.loads.speeds.computed(slot, 1000, 0.1)
    samples = await scrape(client)
    assert value(samples, "measured_prefill_worker_ranks", **SCOPE) == 4
    assert "select_service_measured_decode_worker_ranks" not in names(samples)
    assert "select_service_measured_rank_kv_tokens" not in names(samples)


@within(app_client)
async def test_a_doubtful_index_is_read_again_over_the_wire(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service, 2)
    hold(service, 2)
    with EventPublisher() as engine:
        endpoints = {
            "kv_events_endpoint": engine.endpoint,
            "replay_endpoint": engine.replay_endpoint,
        }
        add_worker(service, 1, **endpoints)
        rank = WorkerRank(1, 0)
        stream = service.core.membership.stream_at(rank)
        index = service.core.partitions[Scope("default", "default")].index
        assert stream is not None
        assert service.sources.listeners is not None
        listeners = service.sources.listeners
        await until(lambda: (link := listeners.link(stream)) is not None and link.is_connected)
        tokens = list(range(64))
        payload = encode_batch(
            1.0, [StoredBlocks((1, 2, 3, 4), None, tuple(tokens))], block_size=16
        )
        while not index.holds_anything(rank):  # it may be connected and not subscribed yet
            engine.publish(payload)
            await asyncio.sleep(0.02)
        # what it missed before it was subscribed may be asked for
        await until(lambda: (engine.serve_replay(), not stream.is_replaying)[1])
        before, replays = stream.tallies.batches, stream.tallies.replays.get("complete", 0)
        hold(service, 1)  # which it has never said
        for worker_id, found in ((2, 64), *[(1, 0)] * 8):
            await book(client, worker_id)
            assert (await client.post(DONE, json={"cached_tokens": found})).status_code == 200
            await client.delete("/reservations/r")
        assert (await row(client))["trust"] == 0.0
        rereads = service.core.counters.rereads

        def is_asked_again() -> bool:
            engine.serve_replay()  # what is on its way comes first
            service._carry_out(service.core.tick(service._clock())[1])
            return bool(rereads)

        await until(is_asked_again)
        assert rereads == {"asked": 1}
        await until(lambda: engine.serve_replay() > 0)
        await until(lambda: not stream.is_replaying)
        await until(lambda: stream.tallies.batches > before)
        assert stream.tallies.replays["complete"] > replays
        assert index.blocks_of(rank)[Tier.DEVICE] == 4, "what was never said is gone"
        answer = await client.post("/select", json=BODY | {"allowed_worker_ids": [1]})
        assert answer.json()["overlap"]["gpu"] == 0


@within(app_client, trust_samples=2, trust_error_max=0.5, no_freshness_weighting=True)
async def test_flags_reach_the_core(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    hold(service, 1)
    assert not service.core.trust_monitor._settings.weigh_freshness
    for found in (64, 0, 0):
        await book(client)
        await client.post(DONE, json={"cached_tokens": found})
        await client.delete("/reservations/r")
    assert (await row(client))["reasons"] == ["prediction"]
