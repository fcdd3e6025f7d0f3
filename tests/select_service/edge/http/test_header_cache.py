"""Of a head what matters is kept, the length is read, and reading takes no longer than looking."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from select_service.edge.http.header_cache import GUARDED, KEPT, HeaderCache
from select_service.edge.tracing.request_tracer import parent_in


@pytest.mark.parametrize("name", [b"b3:", b"content-length:", b"traceparent:"])
@pytest.mark.parametrize("blank", [b" ", b"\t"])
@pytest.mark.parametrize("end", [b"\x80", b"a" * 600])
def test_a_long_line_is_read_once(name: bytes, blank: bytes, end: bytes) -> None:
    """Minutes, were every blank tried with every length of what follows."""
    lines = b"\r\n" + name + blank * 4_000_000 + end
    kept, length = HeaderCache(KEPT).read(lines)
    assert not length
    assert (kept == b"") is (end != b"\x80" and not name.startswith(b"content"))
    assert parent_in(lines) is None


_names = st.sampled_from(sorted(GUARDED)) | st.sampled_from(
    [b"x-request-id", b"content-length", b"Content-LENGTH", b"cookie", b"conTent-type", b"accep"]
)
_line = st.builds(
    lambda name, value: name + b":" + value, _names, st.binary(max_size=8) | st.just(b" 12")
)


@given(st.lists(_line, max_size=6))
@example([b"host: s", b"a: b", b"content-length: 3"])
def test_what_is_kept_are_lines_as_they_came(lines: list[bytes]) -> None:
    """Against splitting them: lines with breaks inside are none of ours to distinguish."""
    kept, _ = HeaderCache(KEPT).read(b"".join(b"\r\n" + line for line in lines))
    if any(b"\r" in line or b"\n" in line for line in lines):
        return
    left = kept.split(b"\r\n")[1:]
    matter = [one for one in lines if one.partition(b":")[0].lower() in KEPT]
    assert [one for one in left if one.partition(b":")[0].lower() in KEPT] == matter
