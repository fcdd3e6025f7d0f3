"""What becomes of a stream: its reservation through the response, refusals, limits, broken ends."""

from __future__ import annotations

import grpc
import pytest

from select_service.edge.epp import processing_stream
from tests.select_service.edge.epp.gateway import (
    Gateway,
    body,
    endpoint_in,
    headers,
    placed,
    played,
    receive,
    refused,
    requested,
    response_headers,
    say,
)
from tests.wait import until

TOKENS = list(range(64))
PROMPT = {"model": "m", "prompt": TOKENS}


@played()
async def test_the_first_bytes_end_the_prefill_and_the_end_frees(at: Gateway) -> None:
    at.add_worker()
    stream, endpoint = await placed(at, PROMPT)
    assert endpoint == "10.0.0.1:8000"
    assert at.driver.awaited == 1
    assert at.loads() == {1: (len(TOKENS), 1)}
    await say(stream, response_headers(endpoint))
    assert (await receive(stream)).WhichOneof("response") == "response_headers"
    assert at.loads() == {1: (len(TOKENS), 1)}
    await say(stream, body(b"data", end=False, kind="response_body"))
    await receive(stream)
    assert at.loads() == {1: (0, 1)}
    assert at.driver.awaited == 1
    await say(stream, body(b"", kind="response_body"))
    await receive(stream)
    assert at.driver.awaited == 0
    await stream.done_writing()
    await at.settled()
    assert at.traffic.served == {"chosen": 1, "moved": 0, "unknown": 0}
    assert (at.traffic.chosen, at.traffic.broken) == (1, 0)


@pytest.mark.parametrize("after", ["choice", "headers", "body"])
@pytest.mark.parametrize("how", ["cancel", "half_close"])
@played()
async def test_a_stream_that_breaks_frees(at: Gateway, *, after: str, how: str) -> None:
    at.add_worker()
    stream, endpoint = await placed(at, PROMPT)
    if after != "choice":
        await say(stream, response_headers(endpoint))
        await receive(stream)
    if after == "body":
        await say(stream, body(b"data", end=False, kind="response_body"))
        await receive(stream)
    assert at.driver.awaited == 1
    if how == "cancel":
        stream.cancel()
    else:
        await stream.done_writing()
    await until(lambda: not at.driver.awaited)
    await at.settled()
    assert at.traffic.broken == 1


@played()
async def test_a_stream_that_breaks_before_the_choice_leaves_nothing(at: Gateway) -> None:
    at.add_worker()
    stream = at.stream()
    await say(stream, headers())
    await say(stream, body(b'{"model"', end=False))
    await until(lambda: at.traffic.buffered_bytes)
    stream.cancel()
    await at.settled()
    assert at.traffic.broken == at.traffic.chosen == 0


@played(max_inflight_default=1)
async def test_a_request_that_waits_is_placed_when_one_ends(at: Gateway) -> None:
    at.add_worker()
    first, _ = await placed(at, PROMPT)
    second, third = await requested(at, PROMPT), await requested(at, PROMPT)
    await until(lambda: at.driver.waiting == 2)
    third.cancel()
    await until(lambda: at.driver.waiting == 1)
    assert at.driver.awaited == 2
    first.cancel()
    assert endpoint_in(await receive(second)) == "10.0.0.1:8000"
    second.cancel()


@played(max_inflight_default=1, max_queued_default=0)
async def test_what_is_shed_is_429_with_a_time(at: Gateway) -> None:
    at.add_worker()
    first, _ = await placed(at, PROMPT)
    stream = await requested(at, PROMPT)
    status, named, said = await refused(stream)
    assert status == 429
    assert int(named["retry-after"]) >= 1
    assert said["error"]
    first.cancel()


@played()
async def test_nobody_to_serve_is_503(at: Gateway) -> None:
    stream = await requested(at, PROMPT)
    status, named, said = await refused(stream)
    assert (status, said["code"]) == (503, "no_schedulable_worker")
    assert int(named["retry-after"]) >= 1


@played()
async def test_an_endpoint_without_an_address_is_503_and_frees(at: Gateway) -> None:
    at.add_worker(endpoint="http://engine.example:8000")
    stream = await requested(at, PROMPT)
    status, _, said = await refused(stream)
    assert (status, said["code"]) == (503, "endpoint_unusable")


@played(epp_body_bytes_max=1024)
@pytest.mark.parametrize("mode", [2, 4])
async def test_a_body_that_is_too_long_is_413(at: Gateway, *, mode: int) -> None:
    at.add_worker()
    stream = at.stream()
    await say(stream, headers(request_mode=mode))
    if mode == 2:
        await receive(stream)
        await say(stream, body(b" " * 1025))
    else:
        for _ in range(2):
            await say(stream, body(b" " * 513, end=False))
    status, _, said = await refused(stream)
    assert (status, said["code"]) == (413, "body_too_large")
    assert at.traffic.limit_hits["epp_body_bytes_max"] == 1


@played(epp_body_bytes_max=1024)
async def test_a_message_beyond_all_bounds_ends_its_stream_alone(at: Gateway) -> None:
    at.add_worker()
    stream = at.stream()
    await say(stream, headers(request_mode=2))
    await receive(stream)
    await say(stream, body(b" " * (2 << 20)))
    assert await stream.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    other, _ = await placed(at, PROMPT)
    other.cancel()


@played(epp_buffered_bytes_max=1024)
async def test_bodies_of_all_streams_are_bounded_together(at: Gateway) -> None:
    at.add_worker()
    first, second = at.stream(), at.stream()
    await say(first, headers())
    await say(first, body(b" " * 600, end=False))
    await until(lambda: at.traffic.buffered_bytes == 600)
    await say(second, headers())
    await say(second, body(b" " * 600, end=False))
    status, named, _ = await refused(second)
    assert status == 429
    assert "retry-after" in named
    await say(first, body(b'{"model": "m", "prompt": [1, 2, 3]}'))
    assert endpoint_in(await receive(first)) == "10.0.0.1:8000"
    first.cancel()


@played(epp_streams_max=1)
async def test_streams_are_bounded(at: Gateway) -> None:
    at.add_worker()
    first, _ = await placed(at, PROMPT)
    second = at.stream()  # refused whatever it would say
    status, named, said = await refused(second)
    assert (status, said["code"], "retry-after" in named) == (429, "too_many_streams", True)
    assert at.traffic.limit_hits["epp_streams_max"] == 1
    first.cancel()
    await until(lambda: not at.traffic.streams)
    third, _ = await placed(at, PROMPT)
    third.cancel()


@played()
async def test_a_request_that_another_worker_served_moves(at: Gateway) -> None:
    at.add_worker(1)
    stream, endpoint = await placed(at, PROMPT)
    at.add_worker(2)
    await say(stream, response_headers("10.0.0.2:8000"))
    await receive(stream)
    loads = {name: requests for name, (_, requests) in at.loads().items()}
    assert (endpoint, loads) == ("10.0.0.1:8000", {1: 0, 2: 1})
    await say(stream, body(b"", kind="response_body"))
    await receive(stream)
    assert at.driver.awaited == 0
    await stream.done_writing()
    await at.settled()
    assert at.traffic.served["moved"] == 1


@played()
async def test_an_unknown_server_moves_nothing(at: Gateway) -> None:
    at.add_worker(1)
    stream, _ = await placed(at, PROMPT)
    await say(stream, response_headers("10.9.9.9:1"))
    await receive(stream)
    assert at.driver.awaited == 1
    assert at.traffic.served["unknown"] == 1
    stream.cancel()


@played(reservation_ttl_s=100.0)
async def test_a_long_response_keeps_its_reservation(
    at: Gateway, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processing_stream, "_SIGN_OF_LIFE_S", 0.0)
    at.add_worker()
    stream, endpoint = await placed(at, PROMPT)
    await say(stream, response_headers(endpoint))
    await receive(stream)
    seen = []
    for _ in range(3):
        await say(stream, body(b"data", end=False, kind="response_body"))
        await receive(stream)
        seen.append(at.reservation.touched)
    assert seen == sorted(set(seen))
    stream.cancel()


@played()
async def test_what_ended_elsewhere_is_counted(at: Gateway) -> None:
    at.add_worker()
    stream, endpoint = await placed(at, PROMPT)
    at.driver.delete_worker(1)
    await until(lambda: not at.driver.awaited)
    await say(stream, response_headers(endpoint))
    await receive(stream)
    for _ in range(2):
        await say(stream, body(b"data", end=False, kind="response_body"))
        await receive(stream)
    assert at.traffic.lost == 1
    stream.cancel()


@pytest.mark.parametrize("data", [b"\xff\xff", b"", b"\x42\x00"])
@played()
async def test_bytes_that_are_no_message_end_their_stream_alone(
    at: Gateway, *, data: bytes
) -> None:
    at.add_worker()
    stream = at.stream()
    await stream.write(data)
    assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await stream.details()
    other, _ = await placed(at, PROMPT)
    other.cancel()
    await at.settled()
    assert at.traffic.crashes == 0


@played()
async def test_messages_out_of_order_end_their_stream(at: Gateway) -> None:
    at.add_worker()
    for late in (headers(), body(PROMPT)):
        stream, _ = await placed(at, PROMPT)
        await say(stream, late)
        assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: not at.driver.awaited)


@played()
async def test_objective_and_fairness_name_class_and_share(at: Gateway) -> None:
    at.add_worker()
    named = {
        "x-gateway-inference-objective": "batch",
        "x-gateway-inference-fairness-id": "team-a",
    }
    stream, _ = await placed(at, PROMPT, **named)
    assert at.reservation.fairness_id == "team-a"
    stream.cancel()


@played()
async def test_tokens_meet_the_cache_of_their_salt(at: Gateway) -> None:
    at.add_worker(1)
    at.add_worker(2)
    at.store(2, TOKENS, "s")
    for salt, cached in (("s", len(TOKENS)), ("t", 0)):
        stream, endpoint = await placed(at, PROMPT | {"cache_salt": salt})
        left = at.loads()[int(endpoint.split(".")[3].split(":")[0])][0]
        assert left == len(TOKENS) - cached
        if cached:
            assert endpoint == "10.0.0.2:8000"
        stream.cancel()
        await until(lambda: not at.driver.awaited)
    assert at.traffic.prompts["token_ids"] == 2


@played()
async def test_a_text_is_placed_by_its_length(at: Gateway) -> None:
    at.add_worker()
    stream, _ = await placed(at, {"model": "m", "prompt": "x" * 400})
    assert at.loads() == {1: (100, 1)}
    assert at.traffic.load_alone["engine_off"] == 1
    stream.cancel()
