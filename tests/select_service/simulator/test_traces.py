"""Recorded traffic, read line by line."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from select_service.simulator.core.requests import Request, chain_of
from select_service.simulator.traces import READERS, BadTrace, TraceWorkload, in_order

MOONCAKE = [
    b'{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}\n',
    b"\n",
    b'{"timestamp": 3000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 7]}\n',
]


def read(name: str, lines: list[bytes], block_size: int = 512) -> list[Request]:
    return list(READERS[name](lines, block_size))


def test_mooncake_names_full_blocks_only() -> None:
    first, second = read("mooncake", MOONCAKE)
    assert (first.arrival, first.isl, first.osl, first.blocks) == (0.0, 1100, 5, chain_of([1, 2]))
    assert (second.arrival, second.isl, second.osl, second.blocks) == (
        3.0,
        1024,
        1,
        chain_of([1, 8]),
    )


def test_mooncake_in_smaller_blocks_shares_as_much() -> None:
    first, second = read("mooncake", MOONCAKE, 128)
    assert len(first.blocks) == 1100 // 128
    shared = [a == b for a, b in zip(first.blocks, second.blocks, strict=True)]
    assert shared == [True] * 4 + [False] * 4
    with pytest.raises(ValueError, match="512"):
        read("mooncake", MOONCAKE, 100)


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b'{"timestamp": 0}',
        b'{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}',
        b'{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [-1]}',
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: bytes) -> None:
    with pytest.raises(BadTrace, match="line 4"):
        read("mooncake", [*MOONCAKE, line])


def call(at: object, said: list[tuple[str, str]], answer: str, **more: Any) -> bytes:
    messages = [{"role": role, "content": content} for role, content in said]
    reply = {"choices": [{"message": {"role": "assistant", "content": answer}}]}
    body = {"messages": messages, "user": "u1"}
    return json.dumps({"timestamp": at, "request": body, "response": reply | more}).encode()


def test_a_log_of_calls_shares_what_its_texts_share() -> None:
    turn = [("system", "You are terse. " * 20), ("user", "Why? " * 40)]
    answer = "Because. " * 30
    later = [*turn, ("assistant", answer), ("user", "Really? " * 30)]
    lines = [
        call("2026-01-01T00:00:00+00:00", turn, answer),
        call("2026-01-01T00:00:02.5+00:00", later, "Yes."),
        call("2026-01-01T00:00:03+00:00", [("user", "Something else. " * 60)], "No."),
    ]
    first, second, other = read("openai", lines, 16)
    assert [one.arrival for one in (first, second, other)] == [0.0, 2.5, 3.0]
    assert first.session == "u1"
    assert first.isl == len("<system>" + turn[0][1] + "\n<user>" + turn[1][1] + "\n") // 4
    assert second.blocks[: len(first.blocks)] == first.blocks, "with the answer"
    assert len(first.blocks) > first.isl // 16
    assert not set(other.blocks) & set(first.blocks)


def test_a_log_that_counts_its_tokens_is_believed() -> None:
    usage = {"usage": {"prompt_tokens": 100, "completion_tokens": 7}}
    flat = {"created": 5, "prompt": "x" * 800, "max_tokens": 50, **usage}
    (one,) = read("openai", [json.dumps(flat).encode()], 16)
    assert (one.isl, one.osl, one.expected_osl) == (100, 7, 50)
    assert len(one.blocks) == 107 // 16


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"prompt": "x"}, "no timestamp"),
        ({"created": 1}, "no messages"),
        ({"timestamp": "noon", "prompt": "x"}, "ISO 8601"),
        ({"created": 1, "prompt": "x", "usage": {"prompt_tokens": -4}}, "negative"),
    ],
)
def test_a_log_line_without_what_is_needed_is_named(line: dict[str, Any], why: str) -> None:
    with pytest.raises(BadTrace, match=f"line 1: .*{why}"):
        read("openai", [json.dumps(line).encode()])


def test_a_log_written_as_answers_ended_is_put_in_order() -> None:
    lines = [call(at, [("user", str(at))], "Yes.") for at in (1_763_800_009.0, 1_763_800_002.5)]
    came = in_order(read("openai", lines, 16))
    assert [(one.arrival, one.number) for one in came] == [(0.0, 2), (6.5, 1)]
    assert not in_order([])


def test_a_trace_whose_timestamps_have_another_unit_is_refused() -> None:
    line = b'{"timestamp": %d, "input_length": 9, "output_length": 5, "hash_ids": [0]}'
    in_order(read("mooncake", [line % 0, line % 31_000_000_000]))
    with pytest.raises(BadTrace, match="another unit"):
        in_order(read("mooncake", [line % 0, line % 1_763_800_000_000_000]))


def test_ids_that_are_hashes_have_names_of_their_own() -> None:
    ids = [0, 2**63, 2**64 - 2, 2**64 - 1]
    line = {"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
    (one,) = read("mooncake", [json.dumps(line).encode()], 16)
    assert len(set(one.blocks)) == len(one.blocks) == 32 * len(ids)
    assert one.blocks[:32] == chain_of(range(1, 33))
    assert max(one.blocks) < 2**64


def plain(count: int) -> list[Request]:
    return [
        Request(number=at, arrival=3.0 * (at // 4), isl=1, osl=1, blocks=chain_of())
        for at in range(count)
    ]


def test_a_trace_goes_as_fast_and_as_far_as_it_is_told() -> None:
    source = TraceWorkload(plain(20), 512, random.Random(1), speed=3.0, limit=10)
    times = [one.arrival for one in iter(source.next, None)]
    assert times == [at // 4 * 1.0 for at in range(10)]


def test_jitter_spreads_the_ticks_of_a_coarse_clock_and_keeps_order() -> None:
    source = TraceWorkload(plain(400), 512, random.Random(1), jitter_s=6.0)
    found = list(iter(source.next, None))
    times = [one.arrival for one in found]
    assert times == sorted(times)
    assert len(set(times)) == 400
    assert sorted(one.number for one in found) == list(range(400))
    assert all(0.0 <= one.arrival - 3.0 * (one.number // 4) < 6.0 for one in found)
