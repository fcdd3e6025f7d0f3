"""Which form a body is in, and which an answer is wanted in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.edge.codec.formats import MSGPACK_TYPES, Format, answer_type, form_of


@pytest.mark.parametrize(
    ("content_type", "form"),
    [
        (None, None),
        (b"", None),
        (b"text/plain", None),
        (b"application/json", Format.JSON),
        (b"Application/JSON ; charset=utf-8", Format.JSON),
        (b"application/vnd.x+json", Format.JSON),
        (b"application/jsonx", None),
        (b"application/msgpack", Format.MSGPACK),
        (b" application/X-MsgPack;v=1", Format.MSGPACK),
        (b"application/vnd.msgpack", Format.MSGPACK),
        (b"application/msgpack2", None),
        (b"msgpack", None),
    ],
)
def test_bodies(content_type: bytes | None, form: Format | None) -> None:
    assert form_of(content_type) is form


@pytest.mark.parametrize(
    ("accept", "name"),
    [
        (b"", None),
        (b"*/*", None),
        (b"application/*", None),
        (b"application/json", None),
        (b"application/msgpack", b"application/msgpack"),
        (b"APPLICATION/X-MSGPACK", b"application/x-msgpack"),
        (b"application/vnd.msgpack;v=1", b"application/vnd.msgpack"),
        (b"application/msgpack, application/json", None),  # a tie
        (b"application/msgpack, */*", None),
        (b"application/msgpack, */*;q=0.9", b"application/msgpack"),
        (b"application/json;q=0.5, application/msgpack", b"application/msgpack"),
        (b"application/json;q=0.5 ,\tapplication/msgpack ; q=0.4", None),
        (b"application/msgpack;q=0.5, application/json;q=0.4, */*", b"application/msgpack"),
        (
            b"application/msgpack;q=0.5, application/*;q=0.8, application/json;q=0",
            b"application/msgpack",
        ),
        (b"application/msgpack;q=0", None),
        (b"application/msgpack;q=much", None),
        (b"application/msgpack;q=2", None),
        (b"application/msgpack;q=0.8, application/x-msgpack;Q=0.9", b"application/x-msgpack"),
        (b"text/msgpack", None),
        (b"text/html, application/msgpack", b"application/msgpack"),
        (b",,;,application/msgpack", b"application/msgpack"),
    ],
)
def test_answers(accept: bytes, name: bytes | None) -> None:
    assert answer_type(accept) == name


@given(st.lists(st.sampled_from([*MSGPACK_TYPES, b"*/*", b"q=1", b";", b",", b" ", b"=", b"q=.5"])))
def test_any_header(parts: list[bytes]) -> None:
    assert answer_type(b"".join(parts)) in {None, *MSGPACK_TYPES}
    form_of(b"".join(parts))
