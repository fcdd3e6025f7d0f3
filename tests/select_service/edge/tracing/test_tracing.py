"""Traces of a live service, as a collector gets them."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.live.collector import Collector
from tests.select_service.edge.serving import PROMPT, Wire, add_worker, app_client
from tests.select_service.edge.tracing.traced import ON, traced
from tests.wait import until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"traceparent: 00-{TRACE}-{PARENT}-01"


PLACED = ["admission", "match", "pick", "book"]


async def test_a_booking_with_all_its_steps(collector: Collector) -> None:
    before = time.time_ns()
    async with traced() as (wire, _):
        body = {**PROMPT, "selection_id": "s1", "reservation_id": "r1"}
        state = "tracestate: congo=t61rcWkgMzE"
        assert await wire.status("POST", "/select_and_reserve", body, TRACEPARENT, state) == 200
        assert await wire.status("POST", "/reservations/r1/prefill_complete") == 200
        assert await wire.status("DELETE", "/reservations/r1") == 200
    booked, completed, freed = collector.servers()
    assert (booked.name, booked.trace_id, booked.parent_id) == (
        *("POST /select_and_reserve", TRACE, PARENT),
    )
    assert booked.state == "congo=t61rcWkgMzE"
    assert (
        booked.facts.items()
        >= {
            "http.request.method": "POST",
            "http.route": "/select_and_reserve",
            "http.response.status_code": 200,
            "select.selection_id": "s1",
            "select.reservation_id": "r1",
            "select.model_name": "default",
            "select.tenant_id": "default",
            "select.isl_tokens": 32,
            "select.worker_id": "1",
            "select.dp_rank": 0,
            "select.cost": 4.0,
            "select.overlap_tokens": 0,
            "select.effective_prefill_tokens": 32,
            "select.potential_decode_blocks": 2,
            "select.outcome": "placed",
        }.items()
    )
    assert booked.of["service.name"] == "select-service"
    steps = collector.children(booked)
    assert [one.name for one in steps] == PLACED
    assert {one.trace_id for one in steps} == {TRACE}
    times = [booked.began_ns, *(step.began_ns for step in steps), booked.ended_ns]
    assert times == sorted(times)
    assert before <= booked.began_ns <= booked.ended_ns <= time.time_ns()
    for step, following in pairwise(steps):
        assert step.ended_ns == following.began_ns
    assert (completed["reservation_id"], freed["reservation_id"]) == ("r1", "r1")
    assert completed.parent_id == freed.parent_id == ""
    assert len({booked.trace_id, completed.trace_id, freed.trace_id}) == 3


async def test_one_connection_many_parents(collector: Collector) -> None:
    """Heads that differ in nothing but their parent are distinguished, also once they are known."""
    asked = [f"{number:032x}-{number:016x}-01" for number in range(1, 7)]
    async with traced() as (wire, _):
        for parent in asked:
            assert await wire.status("POST", "/select", PROMPT, f"Traceparent: 00-{parent}") == 200
            assert await wire.status("POST", "/select", PROMPT) == 200
    spans = collector.servers()
    assert [f"{one.trace_id}-{one.parent_id}-01" for one in spans[::2]] == asked
    assert all(one.parent_id == "" for one in spans[1::2])
    assert {tuple(child.name for child in collector.children(one)) for one in spans} == {
        ("admission", "match", "pick")
    }


@pytest.mark.parametrize(
    ("settings", "flags", "count"),
    [
        ({}, "00", 0),
        ({}, "01", 1),
        ({}, "03", 1),
        ({"trace_sampler": "always_on"}, "00", 1),
        ({"trace_sampler": "always_off"}, "01", 0),
        ({"trace_sampler": "parentbased_always_off"}, "01", 1),
        ({"trace_sample_ratio": 0.0}, "01", 1),
        ({"trace_sample_ratio": 0.0}, None, 0),
        ({"trace_sampler": "parentbased_always_off"}, None, 0),
        ({}, None, 1),
        ({"trace_sampler": "traceidratio", "trace_sample_ratio": 0.4}, "01", 0),
        ({"trace_sampler": "traceidratio", "trace_sample_ratio": 0.6}, "00", 1),
    ],
)
async def test_sampling(
    collector: Collector, settings: dict[str, Any], flags: str | None, count: int
) -> None:
    headers = [] if flags is None else [f"traceparent: 00-{TRACE}-{PARENT}-{flags}"]
    async with traced(**settings) as (wire, _):
        for _ in range(2):
            assert await wire.status("POST", "/select", PROMPT, *headers) == 200
    assert len(collector.servers()) == 2 * count


async def test_a_share_is_about_that(collector: Collector) -> None:
    async with traced(trace_sample_ratio=0.25) as (wire, _):
        for _ in range(400):
            await wire.status("POST", "/select", PROMPT)
    assert 55 <= len(collector.servers()) <= 150  # 5 standard deviations


@pytest.mark.parametrize(
    "said",
    [
        "",
        "garbage",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-01-extra",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-0x",
        f"00-{TRACE}-{PARENT}-01\r\ntraceparent: 00-{TRACE}-{PARENT}-01",
        "x" * 600,
        "x" * 4000,
    ],
)
async def test_a_parent_that_makes_no_sense_is_none(collector: Collector, said: str) -> None:
    async with traced() as (wire, _):
        for _ in range(2):
            assert await wire.status("POST", "/select", PROMPT, f"traceparent: {said}") == 200
            assert await wire.status("GET", "/health") == 200
    spans = collector.servers()
    assert [one.parent_id for one in spans] == ["", ""]
    assert TRACE not in {one.trace_id for one in spans}


async def test_a_later_version_may_say_more(collector: Collector) -> None:
    async with traced() as (wire, _):
        later = f"traceparent: cc-{TRACE}-{PARENT}-01-what-the-future-holds"
        long = "tracestate: " + ",".join(f"k{number}=v" for number in range(200))
        assert await wire.status("POST", "/select", PROMPT, later, long) == 200
    (span,) = collector.servers()
    assert (span.trace_id, span.parent_id, span.state) == (TRACE, PARENT, "")


async def test_refusals_and_faults_are_marked(collector: Collector, monkeypatch: Any) -> None:
    async with traced() as (wire, service):
        assert await wire.status("DELETE", "/workers/7") == 404
        assert await wire.status("POST", "/select", {"isl_tokens": "x"}) == 422
        assert await wire.status("POST", "/select", {**PROMPT, "allowed_worker_ids": [9]}) == 503
        wire.ask_packed(
            "POST",
            "/select",
            {**PROMPT, "allowed_worker_ids": [9]},
            "accept: application/msgpack",
        )
        assert (await wire.answer())[0] == 503
        monkeypatch.setattr(service, "load_scopes", lambda *_: 1 / 0)
        assert await wire.status("GET", "/loads") == 500
    absent, wrong, nobody, packed, crashed = collector.servers()
    assert (absent["worker_id"], absent["refusal.code"], absent.failed) == (
        "7",
        "worker_not_found",
        False,
    )
    assert (wrong.facts["http.response.status_code"], wrong.failed) == (422, False)
    assert nobody.failed
    assert nobody["refusal.code"] == packed["refusal.code"] == nobody.facts["error.type"]
    assert nobody["model_name"] == "default"
    assert [one.name for one in collector.children(nobody)] == ["admission"]
    assert (crashed.failed, crashed.facts["http.response.status_code"]) == (True, 500)


async def test_probes_are_traced_only_as_children(collector: Collector) -> None:
    async with traced() as (wire, _):
        for path in ("/health", "/ready", "/metrics"):
            assert await wire.status("GET", path) == 200
        assert await wire.status("GET", "/health", None, TRACEPARENT) == 200
    assert [one.name for one in collector.servers()] == ["GET /health"]


async def test_a_feed_is_traced_as_far_as_its_beginning(collector: Collector) -> None:
    """Whoever looks at the console for a day makes no span of a day, nor one that fails."""
    async with traced() as (wire, service):
        other = await Wire.to(wire.writer.get_extra_info("peername")[1])
        for one in (wire, other):  # the first has to wait for the console to be loaded
            one.ask("GET", "/console/events", None, TRACEPARENT)
            assert b" 200 " in await one.reader.readline()
        tracing = service.tracing
        assert tracing is not None
        await until(lambda: tracing.export.exported == 2)
    assert [span.facts["http.response.status_code"] for span in collector.servers()] == [200, 200]


async def test_long_ids_do_not_wait_for_the_collector(collector: Collector) -> None:
    """A queue of 2048 spans is not one of gigabytes."""
    taken: list[Any] = []
    async with traced(id_length_max=100_000) as (wire, service):
        assert service.tracing is not None
        export = service.tracing.export
        export.put = taken.append  # type: ignore[method-assign, assignment]
        long = dict.fromkeys(("selection_id", "reservation_id"), "i" * 100_000)
        assert await wire.status("POST", "/select_and_reserve", {**PROMPT, **long}) == 200
        assert await wire.status("DELETE", "/reservations/" + "i" * 5_000) == 404
    assert [len(one.facts["select.reservation_id"]) for one in taken] == [257, 257]
    assert max(len(str(value)) for one in taken for value in one.facts.values()) == 257


def waits() -> dict[str, Any]:
    """A service whose one worker takes one request at a time."""
    return {
        "max_inflight_default": 1,
        "max_queued_default": 9,
        "admission_control": "token-capacity",
    }


async def test_who_waits_is_traced_until_the_answer(collector: Collector) -> None:
    async with traced(**waits()) as (wire, service):
        body = {**PROMPT, "reservation_id": "first"}
        assert await wire.status("POST", "/select_and_reserve", body) == 200
        other = await Wire.to(wire.writer.get_extra_info("peername")[1])
        other.ask(
            "POST", "/select_and_reserve", {**PROMPT, "reservation_id": "second"}, TRACEPARENT
        )
        assert service.tracing is not None
        tracing, recorder = service.tracing, service.tracing.recorder
        await until(lambda: len(recorder.waiting) == 1)
        repeat = await Wire.to(wire.writer.get_extra_info("peername")[1])
        repeat.ask("POST", "/select_and_reserve", {**PROMPT, "reservation_id": "second"})
        await until(lambda: tracing.sampled == 3)
        assert await wire.status("DELETE", "/reservations/first") == 200
        assert (await other.answer())[0] == 200
        assert (await repeat.answer())[0] == 200
    (second,) = [one for one in collector.servers() if one.trace_id == TRACE]
    steps = collector.children(second)
    assert [one.name for one in steps] == ["admission", "wait", "match", "pick", "book"]
    assert second["queue_wait_s"] > 0
    assert second["reservation_id"] == "second"
    (freed,) = [one for one in collector.servers() if one.name.startswith("DELETE")]
    assert collector.children(freed) == []
    assert second.began_ns < freed.began_ns < second.ended_ns
    (again,) = [
        one
        for one in collector.servers()
        if one["reservation_id"] == "second" and one is not second
    ]
    assert [one.name for one in collector.children(again)] == ["wait"]
    assert again["worker_id"] == "1"


async def test_who_leaves_while_waiting(collector: Collector) -> None:
    async with traced(**waits()) as (wire, service):
        assert await wire.status("POST", "/select_and_reserve", PROMPT) == 200
        other = await Wire.to(wire.writer.get_extra_info("peername")[1])
        other.ask("POST", "/select_and_reserve", PROMPT, TRACEPARENT)
        assert service.tracing is not None
        recorder = service.tracing.recorder
        await until(lambda: len(recorder.waiting) == 1)
        other.close()
        await until(lambda: not recorder.waiting)
    (gone,) = [one for one in collector.servers() if one.trace_id == TRACE]
    assert gone.facts["http.response.status_code"] == 499


async def test_a_stream_an_unusual_request_and_the_disk(
    collector: Collector, tmp_path: Path
) -> None:
    async with traced(state_dir=str(tmp_path / "state")) as (wire, _):
        head = f"POST /select_and_reserve HTTP/1.1\r\nhost: s\r\n{TRACEPARENT}\r\n"
        body = json.dumps({**PROMPT, "reservation_id": "r"}).encode()
        wire.say(
            head.encode()
            + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
            + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        )
        assert (await wire.answer())[0] == 200
        assert await wire.status("DELETE", "/reservations/r", None, TRACEPARENT) == 200
        for path in ("/workers", "/dump"):
            wire.say(f"HEAD {path} HTTP/1.1\r\nhost: s\r\n{TRACEPARENT}\r\n\r\n".encode())
            await wire.reader.readuntil(b"\r\n\r\n")
        head = f"GET /dump HTTP/1.1\r\nhost: s\r\n{TRACEPARENT}\r\nconnection: close\r\n\r\n"
        wire.say(head.encode())
        assert (await wire.rest()).startswith(b"HTTP/1.1 200")
    assert [(one.name, one.parent_id) for one in collector.servers()] == [
        ("POST /select_and_reserve", PARENT),
        ("DELETE /reservations/{reservation_id}", PARENT),
        ("GET /workers", PARENT),
        ("GET /dump", PARENT),
        ("GET /dump", PARENT),
    ]
    assert [one.name for one in collector.children(collector.servers()[0])] == PLACED


async def test_requests_in_pieces_and_in_a_row(collector: Collector) -> None:
    """However the bytes come, everybody keeps his own parent."""
    parents = [f"{number:016x}" for number in range(1, 5)]

    def request(parent: str) -> bytes:
        body = json.dumps(PROMPT)
        return (
            f"POST /select HTTP/1.1\r\nhost: s\r\ntraceparent: 00-{TRACE}-{parent}-01\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        ).encode()

    async with traced() as (wire, _):
        for cut in (30, 90, -5):
            whole = request(parents[0])
            wire.say(whole[:cut])
            await wire.writer.drain()
            await asyncio.sleep(0.02)  # so that it arrives by itself, as a rule
            wire.say(whole[cut:])
            assert (await wire.answer())[0] == 200
        wire.say(b"".join(map(request, parents)))
        for _ in parents:
            assert (await wire.answer())[0] == 200
    assert [one.parent_id for one in collector.servers()] == [parents[0]] * 3 + parents


async def test_bookings_by_hand_and_pairs(collector: Collector) -> None:
    async with traced() as (wire, service):
        add_worker(service, 2, role="prefill")
        add_worker(service, 3, role="decode")
        body = {**PROMPT, "reservation_id": "r", "worker_id": 1, "dp_rank": 0}
        assert await wire.status("POST", "/reservations", body) == 201
        assert await wire.status("POST", "/select_pair", PROMPT) == 200
    by_hand, pair = collector.servers()
    assert (by_hand["worker_id"], by_hand["reservation_id"]) == ("1", "r")
    assert [one.name for one in collector.children(by_hand)] == ["book"]
    assert [one.name for one in collector.children(pair)] == PLACED
    assert pair["outcome"] in ("aggregated", "disaggregated")


async def test_what_clients_say_harms_nobody(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    """Ids beyond 64 bits, of any length and of any characters are still shown."""
    async with traced() as (wire, service):
        add_worker(service, 2**64 - 1)
        for name in ("\ud800", "x" * 10_000, "\0", "é"):
            body = json.dumps({**PROMPT, "selection_id": name, "allowed_worker_ids": [2**64 - 1]})
            wire.say(
                b"POST /select HTTP/1.1\r\nhost: s\r\ncontent-type: application/json\r\n"
                + b"tracestate: \xff\xfe,=,a=b\r\n"
                + TRACEPARENT.encode()
                + b"\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body.encode())
            )
            await wire.answer()
        assert await wire.status("DELETE", "/reservations/%00x") == 404
    *some, freed = collector.servers()
    assert "opentelemetry" not in caplog.text  # nobody writes our log for us
    assert {one.state for one in some} == {"a=b"}
    placed = [one for one in some if one.facts["http.response.status_code"] == 200]
    assert len(placed) >= 3
    assert {one["worker_id"] for one in placed} == {str(2**64 - 1)}
    assert all(len(one["selection_id"]) <= 257 for one in placed)
    assert freed["refusal.code"] == "reservation_not_found"


async def test_decisions_are_the_same_traced_or_not(collector: Collector) -> None:
    """Ties are drawn alike: looking at a request changes nothing."""

    async def answers(**settings: Any) -> list[Any]:
        found = []
        async with app_client(**settings) as (client, service):
            service.core.selection._rng.seed(7)
            for number in range(1, 6):
                add_worker(service, number)
            for number in range(60):
                hashes = [number % 7, 2]
                prompt = PROMPT | {"block_hashes": hashes, "sequence_hashes": hashes}
                body = {**prompt, "reservation_id": str(number)}
                found.append((await client.post("/select_and_reserve", json=body)).json())
        return found

    assert await answers() == await answers(**ON)
    assert len(collector.servers()) == 60
