"""Exchanges as Envoy and an endpoint picker have them, recorded in Envoy's own messages."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import grpc
import pytest

from select_service.edge.epp.messages import ProcessingResponse
from select_service.types import ReservationRequest
from tests.select_service.edge.epp.gateway import Gateway, played, receive, refused

GOLDEN = json.loads(
    (Path(__file__).parents[4] / "tests/golden/epp/exchanges.json").read_text("utf-8")
)


def add_worker(at: Gateway, name: str) -> None:
    """Of two workers only the first is usual: the other takes what is not for everybody."""
    if name == "several ranks":
        streams = {"3": "tcp://127.0.0.1:9", "4": "tcp://127.0.0.1:9"}
        ranks = {"data_parallel_start_rank": 3, "data_parallel_size": 2}
        at.add_worker(1, **ranks, kv_events_endpoint=None, kv_events_endpoints=streams)
        busy = ReservationRequest(
            reservation_id="busy",
            worker_id=1,
            dp_rank=4,
            model_name="m",
            sequence_hashes=[],
            isl_tokens=9_000,
        )
        at.driver.reserve(busy)
        return
    at.add_worker(1)
    if name == "a subset":
        at.add_worker(2)


@pytest.mark.parametrize("name", GOLDEN["exchanges"])
@played()
async def test_an_exchange_goes_as_recorded(at: Gateway, *, name: str) -> None:
    add_worker(at, name)
    stream = at.stream()
    for sent, gets in GOLDEN["exchanges"][name]:
        await stream.write(base64.b64decode(sent))
        for expected in gets:
            answer = await receive(stream)
            assert answer == ProcessingResponse.FromString(base64.b64decode(expected))
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK
    at.driver.take_back("busy")
    await at.settled()
    assert at.traffic.crashes == at.traffic.lost == 0
    assert at.traffic.broken == (name == "headers alone")


@pytest.mark.parametrize("name", GOLDEN["refused"])
@played()
async def test_a_refusal_is_an_immediate_response(at: Gateway, *, name: str) -> None:
    at.add_worker()
    stream = at.stream()
    status, sends = GOLDEN["refused"][name]
    head, *rest = sends
    await stream.write(base64.b64decode(head))
    if "buffered" in name:
        assert (await receive(stream)).WhichOneof("response") == "request_headers"
    for sent in rest:
        await stream.write(base64.b64decode(sent))
    found, named, body = await refused(stream)
    assert found == status
    assert named["content-type"] == "application/json"
    assert ("retry-after" in named) is (status == 503)
    assert body["error"]
    assert body["code"]
    assert at.traffic.refused == {status: 1}
