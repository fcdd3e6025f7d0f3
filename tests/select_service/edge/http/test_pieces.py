"""Data of many lines is cut behind every so many of them, and nothing of it is lost."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from select_service.edge.http.pieces import LINES_PER_TURN, pieces_of

LONG = b"x" * 2049


@given(
    lines=st.lists(st.sampled_from([b"", b"a", b"\r", LONG]), max_size=3 * LINES_PER_TURN),
    rest=st.sampled_from([b"", b"b", LONG]),
)
@example(lines=[b""] * (LINES_PER_TURN - 1) + [LONG], rest=b"b")
@example(lines=[b""] * LINES_PER_TURN + [LONG], rest=b"")
@example(lines=[b""] * (2 * LINES_PER_TURN - 1) + [LONG], rest=b"")
def test_each_piece_but_the_last_is_of_so_many_lines(lines: list[bytes], rest: bytes) -> None:
    data = b"".join(line + b"\n" for line in lines) + rest
    pieces = pieces_of(data)
    if len(data) < len(LONG) or len(lines) <= LINES_PER_TURN:
        assert pieces is None
        return
    assert pieces is not None
    whole = list(pieces)
    assert b"".join(whole) == data
    assert all(one.count(b"\n") == LINES_PER_TURN and one.endswith(b"\n") for one in whole[:-1])
    assert all(whole), "none is empty"
    assert whole[-1].count(b"\n") <= LINES_PER_TURN
