"""Lines for tracing are found in a head, and looking for them takes no longer than reading it."""

from __future__ import annotations

import pytest

from select_service.edge.http.varying import VARYING_LINES
from select_service.edge.tracing.trace_context import parent_in

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_whole_lines_go_and_others_stay() -> None:
    lines = b"\r\nhost: s\r\nTraceParent: \t " + PARENT + b"\r\nbaggage:\r\nb3 : x\r\naccept: b3:x"
    assert VARYING_LINES.sub(b"", lines) == b"\r\nhost: s\r\nb3 : x\r\naccept: b3:x"
    assert parent_in(lines) is not None


@pytest.mark.parametrize("value", [b" " * 513, b"a" * 513, b"\t" * 513 + b"\x80", b"\x80", b"\x00"])
def test_what_is_too_long_or_odd_stays(value: bytes) -> None:
    lines = b"\r\nb3:!" + value
    assert VARYING_LINES.sub(b"", lines) == lines


@pytest.mark.parametrize("blank", [b" ", b"\t"])
@pytest.mark.parametrize("end", [b"\x80", b"a" * 600])
def test_a_long_line_is_read_once(blank: bytes, end: bytes) -> None:
    """Minutes, were every blank tried with every length of what follows."""
    lines = b"\r\nb3:" + blank * 16_000_000 + end
    assert VARYING_LINES.search(lines) is None
