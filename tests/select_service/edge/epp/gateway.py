"""A gateway as a test plays one: a service with an endpoint picker, and gRPC streams to it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import msgspec
from msgspec.structs import replace

from indexer.core.hashing import block_hashes
from indexer.types import Namespace, Tier
from select_service.edge.app import create_driver
from select_service.edge.driver.driver import Driver
from select_service.edge.epp.messages import (
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from select_service.edge.epp.picker_traffic import PickerTraffic
from select_service.edge.epp.server import EndpointPicker
from select_service.types import WorkerSpec
from tests import wait
from tests.coroutines import within
from tests.select_service.edge.serving import HOST, SETTINGS, worker
from tests.wait import PATIENCE_S

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"


class Gateway:
    """A service, its endpoint picker, and a channel to that."""

    def __init__(self, driver: Driver, picker: EndpointPicker, traffic: PickerTraffic) -> None:
        self.driver, self.picker, self.traffic = driver, picker, traffic
        self.channel: Any = grpc.aio.insecure_channel(f"{HOST}:{picker.port}")

    def add_worker(self, worker_id: int = 1, **fields: Any) -> None:
        """Register a worker at 10.0.0.<id>:8000 for the model `m`."""
        known = {"endpoint": f"http://10.0.0.{worker_id}:8000", "model_name": "m"}
        spec = worker(worker_id, **{**known, **fields})
        self.driver.upsert_worker(msgspec.convert(spec, WorkerSpec))

    def stream(self, *metadata: tuple[str, str]) -> Any:
        """Open a stream of raw bytes."""
        return self.channel.stream_stream(PROCESS)(metadata=metadata, timeout=PATIENCE_S)

    def loads(self) -> dict[int, tuple[int, int]]:
        """Prefill tokens and requests by worker."""
        return {
            row.worker_id: (row.potential_prefill_tokens, row.active_requests)
            for scope in self.driver.loads()
            for row in scope.loads
        }

    @property
    def reservation(self) -> Any:
        """The only one that is live."""
        (booking,) = self.driver.core.lifecycle.bookings.newest(2)
        return booking.reservation

    def store(self, worker_id: int, tokens: list[int], salt: str = "") -> None:
        """Let a worker have whole blocks of a prompt in its cache."""
        (partition,) = self.driver.core.partitions.values()
        ranks = {rank.worker_id: rank for rank, _ in partition.fleet_slots.ranks_and_slots()}
        local = block_hashes(tokens, 16, namespace=Namespace("", salt))
        names = list(range(1, len(tokens) // 16 + 1))
        partition.index.store(ranks[worker_id], Tier.DEVICE, None, names, local)

    async def settled(self) -> None:
        """Wait until no stream is open; then nothing may be left of any."""
        await wait.until(lambda: not self.traffic.streams)
        assert (self.driver.awaited, self.driver.waiting) == (0, 0)
        assert self.traffic.buffered_bytes == 0

    async def health(self, service: str = "") -> int:
        call = self.channel.unary_unary("/grpc.health.v1.Health/Check")
        data = await call(HealthCheckRequest(service=service).SerializeToString())
        found: int = HealthCheckResponse.FromString(data).status
        return found


@contextlib.asynccontextmanager
async def gateway(**settings: Any) -> AsyncIterator[Gateway]:
    chosen = replace(SETTINGS, **{"epp_port": 0, "epp_tokenize_timeout_s": 0.0, **settings})
    driver = create_driver(chosen)
    await driver.start()
    traffic = PickerTraffic()
    picker = EndpointPicker(driver, chosen, traffic)
    try:
        await picker.start()
        at = Gateway(driver, picker, traffic)
        yield at
        await at.settled()
        await at.channel.close()
    finally:
        await picker.close()
        await driver.close()


def played(**settings: Any) -> Any:
    """Let a test have a gateway."""
    return within(gateway, **settings)


async def say(stream: Any, message: Any) -> None:
    await stream.write(message.SerializeToString())


async def receive(stream: Any) -> Any:
    data = await stream.read()
    assert data is not grpc.aio.EOF, "no answer"
    return ProcessingResponse.FromString(data)


def headers(
    fields: Mapping[str, str] | None = None, *, end: bool = False, request_mode: int = 4
) -> Any:
    """The head of a request."""
    message = ProcessingRequest()
    message.request_headers.end_of_stream = end
    message.protocol_config.request_body_mode = request_mode
    message.protocol_config.response_body_mode = request_mode
    known = {":path": "/v1/completions", "content-type": "application/json"}
    for name, value in (known | dict(fields or {})).items():
        mapped = message.request_headers.headers.headers.add()
        mapped.key, mapped.raw_value = name, value.encode()
    return message


def body(data: object, *, end: bool = True, kind: str = "request_body") -> Any:
    message = ProcessingRequest()
    part = getattr(message, kind)
    part.body = data if isinstance(data, bytes) else msgspec.json.encode(data)
    part.end_of_stream = end
    return message


def response_headers(served: str | None = None) -> Any:
    message = ProcessingRequest()
    message.response_headers.SetInParent()
    if served is not None:
        found = message.metadata_context.filter_metadata["envoy.lb"]
        found["x-gateway-destination-endpoint-served"] = served
    return message


async def requested(
    at: Gateway, prompt: object, *credentials: tuple[str, str], **fields: str
) -> Any:
    """Send a request and return its stream."""
    stream = at.stream(*credentials)
    await say(stream, headers(fields))
    await say(stream, body(prompt))
    return stream


async def placed(at: Gateway, prompt: object, **fields: str) -> tuple[Any, str]:
    """Send a request and return its stream, and the endpoint it got."""
    stream = await requested(at, prompt, **fields)
    head, passed = await receive(stream), await receive(stream)
    assert passed.WhichOneof("response") == "request_body"
    return stream, endpoint_in(head)


def endpoint_in(answer: Any) -> str:
    """The endpoint, which header and metadata agree about."""
    part = getattr(answer, answer.WhichOneof("response"))
    named = {
        one.header.key: one.header.raw_value.decode()
        for one in part.response.header_mutation.set_headers
    }
    destination = answer.dynamic_metadata["envoy.lb"][DESTINATION]
    assert named[DESTINATION] == destination
    found: str = destination
    return found


async def refused(stream: Any) -> tuple[int, dict[str, str], dict[str, Any]]:
    """The refusal that comes: its status, headers and body; the stream ends with it."""
    answer = await receive(stream)
    assert answer.WhichOneof("response") == "immediate_response"
    response = answer.immediate_response
    named = {one.header.key: one.header.raw_value.decode() for one in response.headers.set_headers}
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK
    return response.status.code, named, msgspec.json.decode(response.body)
