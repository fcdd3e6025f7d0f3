"""What an answer reports is read whatever its pieces are, and everything else is passed on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.gateway.engine_exchange import UsageReader


def event(**content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


USAGE = {"completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 32}}
WORDS = [event(choices=[{"delta": {"content": 'a "usage" b'}}], usage=None)] * 3
LAST = event(choices=[], usage=USAGE)
STREAM = b"".join([*WORDS, LAST, b": ping\r\n\r\n", b"data: [DONE]\n\n"])


def reader(*, is_stream: bool = True, drops: bool = False, most: int = 1 << 20) -> UsageReader:
    return UsageReader(is_stream=is_stream, drops_usage=drops, bytes_max=most)


def read(one: UsageReader, pieces: list[bytes]) -> bytes:
    return b"".join([one.feed(piece) for piece in pieces] + [one.finish()])


def cut(whole: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({0, len(whole), *(place % len(whole) for place in places)})
    return [whole[start:end] for start, end in pairwise(ends)]


@given(st.lists(st.integers(0, len(STREAM))), st.booleans())
def test_a_stream_is_passed_on_and_read_in_any_pieces(places: list[int], drops: bool) -> None:
    one = reader(drops=drops)
    assert read(one, cut(STREAM, places)) == (STREAM.replace(LAST, b"") if drops else STREAM)
    assert (one.output_tokens, one.cached_tokens, one.has_failed) == (7, 32, False)


@given(st.lists(st.binary()), st.booleans(), st.booleans(), st.integers(1, 64))
def test_anything_is_passed_on(pieces: list[bytes], stream: bool, drops: bool, most: int) -> None:
    assert read(reader(is_stream=stream, drops=drops, most=most), pieces) == b"".join(pieces)


def test_tokens_are_counted_as_they_come() -> None:
    one = reader()
    for count, word in enumerate(WORDS, 1):
        one.feed(word)
        assert one.output_tokens == count
    one.feed(event(choices=[{}], usage={"completion_tokens": 30}))
    assert one.output_tokens == 30, "the engine's own count, where it reports it"


@pytest.mark.parametrize(("code", "is_failure"), [(500, True), (None, True), (400, False)])
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_error_in_an_answer_is_noticed(
    is_stream: bool, code: int | None, is_failure: bool
) -> None:
    error = {"error": {"message": "engine died", "code": code}}
    one = reader(is_stream=is_stream)
    read(one, [event(**error) if is_stream else msgspec.json.encode(error)])
    assert one.has_failed == is_failure


def test_a_whole_answer_is_read_at_its_end_unless_it_is_too_long() -> None:
    answer = msgspec.json.encode({"choices": [{}], "usage": USAGE})
    short, long = reader(is_stream=False), reader(is_stream=False, most=len(answer) - 1)
    for one, cached in ((short, 32), (long, None)):
        assert read(one, cut(answer, [10, 20])) == answer
        assert one.cached_tokens == cached
