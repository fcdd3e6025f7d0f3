"""What header lines of a plain request say, and which are none of a plain request."""

from __future__ import annotations

from select_service.edge.http.header_cache import KEPT, plain_fields

HOST = (b"host", b"s")


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
