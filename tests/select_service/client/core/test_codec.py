"""Answers that are none, whatever they are made of."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.client.core.codec import JSON, MSGPACK, decode
from select_service.client.core.exchange import ExchangeOutcome
from select_service.client.core.problems import NotAnAnswer, refusal

DEEP = [(JSON, b"[" * 100_000), (MSGPACK, b"\x91" * 100_000)]
BROKEN = [(JSON, b"{"), (JSON, b'"\xff"'), (MSGPACK, b"\xc1"), *DEEP]


@pytest.mark.parametrize(("content_type", "body"), BROKEN)
def test_a_body_that_cannot_be_read_is_not_an_answer(content_type: str, body: bytes) -> None:
    kind: Any = Any
    with pytest.raises(NotAnAnswer):
        decode(ExchangeOutcome(0.0, 200, body, content_type), kind)


@pytest.mark.parametrize(("content_type", "body"), DEEP)
def test_a_refusal_nested_too_deeply_is_still_a_refusal(content_type: str, body: bytes) -> None:
    assert refusal(ExchangeOutcome(0.0, 422, body, content_type)).status == 422
