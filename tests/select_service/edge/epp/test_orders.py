"""Whatever a gateway says in whatever order: nothing stays booked or held."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from select_service.edge.app import create_driver
from select_service.edge.epp.messages import ProcessingRequest, ProcessingResponse
from select_service.edge.epp.picker import Picker
from select_service.edge.epp.picker_traffic import PickerTraffic
from select_service.edge.epp.processing_stream import OutOfOrder, ProcessingStream
from select_service.errors import ServiceError
from select_service.types import WorkerSpec
from select_service.types.router_config import PickerLimits
from tests import wait
from tests.effort import examples
from tests.select_service.edge.serving import SETTINGS, worker

LIMITS = PickerLimits(body_bytes_max=200, buffered_bytes_max=300, tokenize_timeout_s=0.0)
BODIES = (b"", b"{", b'{"model": "m", "prompt": [1, 2, 3]}', b'{"prompt": "text"}', b"x" * 150)
KINDS = (
    *("request_headers", "request_body", "request_trailers"),
    *("response_headers", "response_body", "response_trailers"),
)


@st.composite
def message(draw: st.DrawFn) -> Any:
    made = ProcessingRequest()
    kind = draw(st.sampled_from(KINDS))
    part = getattr(made, kind)
    part.SetInParent()
    if kind.endswith("body"):
        part.body = draw(st.sampled_from(BODIES))
    if not kind.endswith("trailers"):
        part.end_of_stream = draw(st.booleans())
    if draw(st.integers(0, 9)) == 0:
        subset = made.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        subset["x-gateway-destination-endpoint-subset"] = draw(
            st.sampled_from(["10.0.0.1:8000", "10.9.9.9:1", ""])
        )
    if draw(st.integers(0, 3)) == 0:
        served = made.metadata_context.filter_metadata["envoy.lb"]
        served["x-gateway-destination-endpoint-served"] = draw(
            st.sampled_from(["10.0.0.1:8000", "10.0.0.2:8000", "10.9.9.9:1", ""])
        )
    return made


def _headers_behind_the_body() -> list[Any]:
    """What a buffered gateway never sends: a body that is placed, and headers after it."""
    body, headers = ProcessingRequest(), ProcessingRequest()
    body.request_body.SetInParent()
    headers.request_headers.end_of_stream = True
    return [body, headers]


@settings(max_examples=examples(300), deadline=None)
@example(messages=_headers_behind_the_body(), modes=(2, 0), looks_on=False)
@given(
    messages=st.lists(message(), max_size=12),
    modes=st.one_of(st.none(), st.tuples(st.integers(-1, 6), st.integers(-1, 6))),
    looks_on=st.integers(0, 19).map(lambda one: one == 0),
)
def test_any_order_leaves_nothing(
    messages: list[Any], modes: tuple[int, int] | None, looks_on: bool
) -> None:
    async def play() -> None:
        driver = create_driver(SETTINGS)
        for number in (1, 2):
            at = {"endpoint": f"http://10.0.0.{number}:8000", "model_name": "m"}
            driver.upsert_worker(msgspec.convert(worker(number, **at), WorkerSpec))
        traffic = PickerTraffic()
        picker = Picker(driver, LIMITS, traffic)
        stream = ProcessingStream(picker, LIMITS, traffic, driver.now)
        chosen = 0
        try:
            for number, one in enumerate(messages):
                if number == 0 and modes is not None:
                    one.protocol_config.request_body_mode = modes[0]
                    one.protocol_config.response_body_mode = modes[1]
                one.observability_mode = looks_on
                answers = await stream.receive(one)
                assert not (looks_on and answers)
                kinds = [answer.WhichOneof("response") for answer in answers]
                assert kinds == sorted(kinds, key=KINDS.index)
                chosen += sum("envoy.lb" in answer.dynamic_metadata for answer in answers)
                assert driver.awaited <= 1
                assert traffic.buffered_bytes <= LIMITS.body_bytes_max
        except (ServiceError, OutOfOrder):
            pass
        finally:
            stream.close()
            stream.close()
        assert chosen == traffic.chosen <= 1
        assert driver.awaited == driver.waiting == traffic.buffered_bytes == 0
        await picker.close()
        await driver.close()

    wait.run(play())


def test_nothing_is_chosen_twice_for_one_stream() -> None:
    """The answer to each message is of its kind, or the destination that was held back."""
    assert {field.name for field in ProcessingResponse.DESCRIPTOR.oneofs[0].fields} == {
        *KINDS,
        "immediate_response",
    }
