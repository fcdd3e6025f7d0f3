"""Handlers and their compiled twins: two services with one life answer alike, call by call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, Final

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from indexer.errors import IndexerError
from select_service.edge import app
from select_service.edge.app import create_door
from select_service.edge.codec.answers import Response
from select_service.edge.codec.forms import Form
from select_service.edge.driver import Driver
from select_service.edge.http.api import Api, Request
from select_service.edge.http.routes import ROUTES
from select_service.errors import ServiceError
from select_service.types import RouterConfig
from tests.effort import examples
from tests.select_service.edge.serving import SETTINGS, seat

pytestmark = pytest.mark.skipif(app.PlainCalls is None, reason="the kernel is not in use")

HASHES: Final = st.sampled_from([[1, 2], [1, 2, 3], [7], []])
NAMES: Final = st.sampled_from(["a", "b", "c", "a\n", "x" * 300])
WHOLE: Final = {"sequence_hashes": [1, 2], "block_hashes": [1, 2], "isl_tokens": 32}
"""What a prompt says that is one."""


@st.composite
def prompts(draw: st.DrawFn) -> dict[str, Any]:
    hashes = draw(HASHES)
    prompt: dict[str, Any] = {"block_hashes": hashes, "sequence_hashes": hashes}
    prompt["isl_tokens"] = draw(st.sampled_from([16 * len(hashes) + 5, 0, 48]))
    odd = {
        "model_name": st.sampled_from(["default", "other"]),
        "bogus": st.just(1),
        "token_ids": st.just([1] * 40),
        "block_hashes": st.just([1]),
        "router_config_override": st.just({"track_prefill_tokens": False}),
        "priority_jump": st.just(1.0),
        "explain": st.just(False),  # what is told has the time of the day in it
        "expected_output_tokens": st.sampled_from([None, 64]),
        "selection_id": NAMES,
        "pinned_worker": st.just({"worker_id": 2, "dp_rank": 0}),
    }
    return prompt | draw(st.fixed_dictionaries({}, optional=odd))


def asked(path: str, *members: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    merged = st.tuples(*members).map(lambda some: {k: v for one in some for k, v in one.items()})
    return st.tuples(st.just(("POST", path)), st.just(()), merged.map(msgspec.json.encode))


RESERVATION: Final = "/reservations/{reservation_id}"
BODIES: Final = st.sampled_from(
    [
        *(b"", b"{}", b" {}", b'{"cached_tokens":5}', b'{"cached_tokens":null}', b"[1"),
        *(b'{"decay_fraction":0.5}', b'{"decay_fraction":2}', b'{"bogus":1}'),
        *(
            b'{"decay_fraction":%b}' % text
            for text in (b" 0.25", b"1", b"0", b"00.5", b".5", b"1.", b"0.1.2", b"", b" ", b"5e-1")
        ),
        *(b'{"decay_fraction":-0.5}', b'{"decay_fraction":null}', b'{"decay_fraction":"0.5"}'),
        *(b'{"decay_fraction":0.5', b'{"decay_fraction":0.5,"a":1}', b'{"decay_fraction" :0.5}'),
        b'{"decay_fraction":0.%b}' % (b"3" * 60),
    ]
)
CALLS: Final = st.one_of(
    asked("/select", prompts()),
    asked("/select_and_reserve", prompts(), st.fixed_dictionaries({"reservation_id": NAMES})),
    asked("/select_and_reserve", prompts()),
    asked(
        "/reservations",
        prompts(),
        st.fixed_dictionaries(
            {"reservation_id": NAMES, "worker_id": st.sampled_from([1, 2, 9])},
            optional={
                "dp_rank": st.sampled_from([0, 1, None]),
                "effective_prefill_tokens": st.sampled_from([0, 5, 999]),
                "ttl_s": st.just(3.0),
            },
        ),
    ),
    *(
        st.tuples(st.just((method, path)), st.tuples(NAMES), BODIES)
        for method, path in (
            ("POST", f"{RESERVATION}/prefill_complete"),
            ("POST", f"{RESERVATION}/output_block"),
            ("DELETE", RESERVATION),
        )
    ),
)
RAW: Final = b"raw:"
"""Before a body that is sent as it stands, whatever form it is said to have."""
NAMED: Final = WHOLE | {"reservation_id": "a"}
BOOKED: Final = [(("POST", "/select_and_reserve"), (), msgspec.json.encode(NAMED))]
BY_LINE: Final = {(route.method, route.pattern): route for route in ROUTES}


async def lived(calls: list[Any], *, compiled: bool, form: Form) -> list[object]:
    """All that one service answers, and what it tells of its load after each call."""
    service = Driver(RouterConfig(), seed=1, clock=lambda: 5.0)
    await service.start()
    try:
        for worker_id in (1, 2):
            seat(service, worker_id)
        door, traffic = create_door(service, SETTINGS)
        type_ = b"application/json" if form is Form.JSON else b"application/msgpack"
        api = door.head_of(type_, type_).api
        return [
            (
                await _answered(api, call, compiled=compiled),
                service.loads(),
                dict(traffic.limit_hits),
            )
            for call in calls
        ]
    finally:
        await service.close()


async def _answered(api: Api, call: Any, *, compiled: bool) -> object:
    line, params, body = call
    if body.startswith(RAW):
        body = body.removeprefix(RAW)
    elif api.bodies.select.nothing != b"{}" and body:
        with contextlib.suppress(msgspec.DecodeError):  # no MessagePack either
            body = msgspec.msgpack.encode(msgspec.json.decode(body))
    route = BY_LINE[line]
    handler = api.direct(route) if compiled else route.handler
    assert handler is not None
    assert (handler is not route.handler) == compiled
    try:
        answer = handler(api, Request(params, b"", body))
        if isinstance(answer, Awaitable):
            answer = await answer
    except (ServiceError, IndexerError) as error:
        return type(error), str(error)
    assert isinstance(answer, Response)
    return answer.status, answer.body, answer.headers


@settings(max_examples=examples(40))
@given(st.lists(CALLS, min_size=1, max_size=12), st.sampled_from(Form))
@example([(("POST", "/select"), (), msgspec.json.encode(WHOLE))], Form.MSGPACK)
@example([*BOOKED, (("POST", f"{RESERVATION}/output_block"), ("a",), RAW + b"{}")], Form.MSGPACK)
@example([*BOOKED, (("POST", f"{RESERVATION}/output_block"), ("a",), b"{}")], Form.MSGPACK)
def test_handlers_and_their_twins_answer_alike(calls: list[Any], form: Form) -> None:
    plain = asyncio.run(lived(calls, compiled=False, form=form))
    assert asyncio.run(lived(calls, compiled=True, form=form)) == plain
