"""What header lines of a plain request say, and which are none of a plain request."""

from __future__ import annotations

import pytest

from select_service.edge.http.header_cache import KEPT, LENGTH_DIGITS_MAX
from select_service.edge.http.plain_fields import PlainFields, plain_fields

HOST = (b"host", b"s")


def test_nothing_but_a_host() -> None:
    assert plain_fields([HOST], KEPT, is_old=False) == PlainFields(None, None, None, 0, False, 1)


def test_lists_may_stand_in_several_lines() -> None:
    lines = [
        (b"accept", b"a/b"),
        HOST,
        (b"x-request-id", b"7"),
        (b"content-type", b"application/json"),
        (b"accept", b"c/d"),
        (b"authorization", b"Bearer one"),
        (b"content-length", b"12"),
        (b"authorization", b"Bearer two"),
    ]
    said = plain_fields(lines, KEPT, is_old=False)
    assert said is not None
    assert (said.content_type, said.accept) == (b"application/json", b"a/b,c/d")
    assert said.credentials == b"Bearer one,Bearer two"
    assert (said.length, said.is_chunked) == (12, False)
    assert said.kept == 4, "both of accept, the host and the type"


def test_a_body_in_chunks_has_a_byte_for_all_that_is_said() -> None:
    said = plain_fields([HOST, (b"transfer-encoding", b" Chunked ")], KEPT, is_old=False)
    assert said is not None
    assert (said.length, said.is_chunked) == (1, True)


def test_who_speaks_http_1_0_need_not_name_a_host() -> None:
    assert plain_fields([], KEPT, is_old=True) is not None
    assert plain_fields([], KEPT, is_old=False) is None


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(
    "line",
    [
        (b"host", b"another"),
        (b"content-length", b"9" * (LENGTH_DIGITS_MAX + 1)),
        (b"transfer-encoding", b"gzip, chunked"),
        (b"content-encoding", b"gzip"),
        (b"expect", b"100-continue"),
        (b"upgrade", b"websocket"),
    ],
    ids=lambda line: line[0].decode(),
)
def test_what_is_not_plain(line: tuple[bytes, bytes], is_old: bool) -> None:
    assert plain_fields([HOST, line], KEPT, is_old=is_old) is None


def test_chunks_are_not_of_http_1_0() -> None:
    assert plain_fields([HOST, (b"transfer-encoding", b"chunked")], KEPT, is_old=True) is None


def test_a_host_that_is_none() -> None:
    assert plain_fields([(b"host", b"a b")], KEPT, is_old=False) is None
