"""How a CURVE key is written, against libzmq's own reading."""

from __future__ import annotations

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from indexer.core.curve_key import is_curve_key


@given(st.binary(min_size=32, max_size=32))
def test_every_32_bytes_have_a_spelling(raw: bytes) -> None:
    assert is_curve_key(z85.encode(raw).decode())


def test_genuine_keys() -> None:
    for key in zmq.curve_keypair():
        assert is_curve_key(key.decode())


@pytest.mark.parametrize(
    "text", ["", "a" * 39, "a" * 41, "a" * 39 + '"', "a" * 39 + " ", "#" * 40, "é" * 40]
)
def test_what_is_none(text: str) -> None:
    assert not is_curve_key(text)
