"""Recorded traffic, read line by line."""

from __future__ import annotations

import json
import random
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from select_service.simulator.core.requests import ClientRequest, chain_of
from select_service.simulator.runs import run
from select_service.simulator.settings import SimulationSettings, Trace
from select_service.simulator.traces import READERS, BadTrace, TraceWorkload, in_order
from select_service.types import RouterConfig

if TYPE_CHECKING:
    from pathlib import Path

MOONCAKE = [
    b'{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}\n',
    b"\n",
    b'{"timestamp": 3000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 7]}\n',
]


def read(name: str, lines: list[bytes], block_size: int = 512) -> list[ClientRequest]:
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


def test_agents_come_as_calls_or_as_whole_programs() -> None:
    calls = [
        {"t": 1.5, "in": 130, "out": 7, "hash_ids": [3, 4, 9], "session_id": "s"},
        {"t": 2.5, "in": 64, "out": 0, "hash_ids": [3], "session_id": "s"},
    ]
    first, second = read("agents", [json.dumps(one).encode() for one in calls], 64)
    assert (first.arrival, first.isl, first.osl, first.session) == (1.5, 130, 7, "s")
    assert (first.blocks, second.blocks, second.osl) == (chain_of([4, 5]), chain_of([4]), 1)
    program = {"id": "p", "block_size": 128, "hash_id_scope": "local", "requests": calls}
    for one in calls:
        del one["session_id"]
    lines = [json.dumps(program | {"id": name}).encode() for name in "pq"]
    read_here = read("agents", lines, 64)
    assert [one.session for one in read_here] == ["p", "p", "q", "q"]
    assert [one.number for one in read_here] == [1, 2, 3, 4], "each is a request of its own"
    assert read_here[0].blocks[:1] == read_here[1].blocks != read_here[3].blocks
    with pytest.raises(BadTrace, match=r"line 1: its blocks of 128 .*--block-size"):
        read("agents", lines, 100)


def test_a_program_has_the_calls_of_its_subagents_as_sessions_of_their_own() -> None:
    """As the public traces of coding agents are: one namespace of blocks for all of them."""
    call = {"type": "n", "model": "m", "in": 128, "out": 7, "stop": "tool_use", "api_time": 1.5}
    inner = [call | {"t": 12.0, "hash_ids": [1, 9]}, call | {"t": 14.0, "hash_ids": [1, 9]}]
    nested = {"type": "subagent", "t": 13.0, "status": "completed", "requests": inner[1:]}
    agent = {"type": "subagent", "agent_id": "a", "t": 11.0, "duration_ms": None}
    program = {
        "id": "p",
        "models": ["m"],
        "block_size": 64,
        "hash_id_scope": "local",
        "tool_tokens": 64,
        "requests": [
            call | {"t": 0.0, "hash_ids": [1, 2]},
            agent | {"requests": [inner[0], nested]},
            call | {"t": 30.0, "hash_ids": [1, 3], "think_time": 2.5},
        ],
    }
    read_here = read("agents", [json.dumps(program).encode()], 64)
    assert [(one.arrival, one.session) for one in read_here] == [
        (0.0, "p"),
        (12.0, "p/a"),
        (14.0, "p/a/1"),
        (30.0, "p"),
    ]
    assert [one.number for one in read_here] == [1, 2, 3, 4]
    assert [one.think_s for one in read_here] == [0.0, 0.0, 0.0, 2.5]
    assert len({one.blocks[0] for one in read_here}) == 1


def test_a_program_of_an_early_trace_says_nothing_of_scope_and_think_time() -> None:
    """Its ids begin at 1 in each program and subagent, and mean other text in each."""
    call = {"in": 128, "out": 7, "hash_ids": [1, 2]}
    requests = [
        call | {"t": 0.0},
        call | {"t": 18.0, "api_time": 10.0},
        {"type": "subagent", "requests": [call | {"t": 20.0}, call | {"t": 21.0}]},
        call | {"t": 40.0},
        call | {"t": 39.0},
        call | {"t": 60.0, "think_time": 3.0},
    ]
    program = json.dumps({"block_size": 64, "requests": requests}).encode()
    read_here = read("agents", [program, program], 64)
    assert [one.think_s for one in read_here[:7]] == [0.0, 18.0, 0.0, 1.0, 12.0, 0.0, 3.0]
    contexts = [one.blocks[0] for one in read_here]
    assert len(set(contexts)) == 4, "two programs with a subagent each"
    assert contexts[0] == contexts[1] == contexts[6]
    assert contexts[2] == contexts[3]
    assert len({one.session for one in read_here}) == 4, "a program without a name is one, too"


def test_times_of_a_program_that_have_another_unit_are_refused_as_times() -> None:
    call = {"in": 64, "out": 1, "hash_ids": [1]}
    program = {"id": "p", "requests": [call | {"t": 0.0}, call | {"t": 1e12}]}
    with pytest.raises(BadTrace, match="do timestamps have another unit"):
        in_order(read("agents", [json.dumps(program).encode()], 64))


def test_a_trace_of_agents_is_played_at_its_times_and_by_users(tmp_path: Path) -> None:
    """Calls as lines, 64 tokens a block: three programs, each call's prompt begins as the last."""
    calls = [
        {
            "t": program + 2.0 * turn,
            "in": 64 * (20 + 4 * turn) + 3,
            "out": 20,
            "hash_ids": [*range(10), *range(100 * program, 100 * program + 11 + 4 * turn)],
            "session_id": f"p{program}",
            "think_time": 1.0,
        }
        for program in (1, 2, 3)
        for turn in range(5)
    ]
    file = tmp_path / "agents.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in calls))
    weights = RouterConfig(policy="first-token")
    settings = SimulationSettings(
        trace=Trace(path=str(file), format="agents"),
        policy="first-token",
        weights=weights,
        session_ttl_s=60.0,
        block_size=64,
        workers=2,
    )
    for trace in (settings.trace, Trace(path=str(file), format="agents", users=2)):
        played = run(msgspec.structs.replace(settings, trace=trace))
        assert (played.ok, played.requests) == (15, 15)
        assert played.hit_share == pytest.approx(1.0, abs=0.1), "sessions stay, and find all"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hash_ids": [-1]}, "line 1: hash_ids"),
        ({"in": 0, "hash_ids": []}, "line 1: in must be at least 1"),
        ({"out": -1}, "line 1: out must not be negative"),
        ({"hash_ids": [*range(9)]}, r"for an in of 64: do they stand for 64 .*\(block_size\)"),
        ({"think_time": -1.0}, "line 1: think_time must be from 0"),
        ({"requests": [{"t": 0}]}, r"line 1: requests\[0\]: .*`hash_ids`"),
        ({"requests": [{"requests": [{}]}]}, r"line 1: requests\[0\]\.requests\[0\]: .*`t`"),
        ({"requests": [], "hash_id_scope": "mine"}, r"line 1: .*\$.hash_id_scope"),
    ],
)
def test_a_trace_of_agents_is_refused_by_its_own_names(
    changes: dict[str, object], why: str
) -> None:
    call = {"t": 0, "in": 64, "out": 1, "hash_ids": [1]}
    with pytest.raises(BadTrace, match=why):
        read("agents", [json.dumps(call | changes).encode()], 64)


def test_mooncake_in_smaller_blocks_shares_as_much() -> None:
    first, second = read("mooncake", MOONCAKE, 128)
    assert len(first.blocks) == 1100 // 128
    shared = [a == b for a, b in zip(first.blocks, second.blocks, strict=True)]
    assert shared == [True] * 4 + [False] * 4
    with pytest.raises(ValueError, match="512"):
        read("mooncake", MOONCAKE, 100)


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


def test_a_log_says_what_its_requests_asked_for() -> None:
    wishes = {"slo_class": "high", "slo_ttft_ms": 250}
    lines = [{"created": 5, "prompt": "x" * 80} | more for more in (wishes, {})]
    given, plain = read("openai", [json.dumps(line).encode() for line in lines])
    assert (given.slo_class, given.slo_ttft_s) == ("high", 0.25)
    assert (plain.slo_class, plain.slo_ttft_s) == ("", None)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"created": 1, "prompt": "x", "slo_ttft_ms": 0}, "slo_ttft_ms"),
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


def plain(count: int) -> list[ClientRequest]:
    return [
        ClientRequest(number=at, arrival=3.0 * (at // 4), isl=1, osl=1, blocks=chain_of())
        for at in range(count)
    ]


def test_a_trace_goes_as_fast_and_as_far_as_it_is_set() -> None:
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


def log(**line: Any) -> bytes:
    return json.dumps({"timestamp": 1.0} | line).encode()


def said(content: object, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


SYSTEM = said("You are terse. " * 20, "system")


def test_a_short_answer_is_no_answer_of_the_longest_kind() -> None:
    asked = {"prompt": "x" * 100, "max_tokens": 4096}
    lines = [
        log(**asked, choices=[{"text": "Yes"}]),
        log(**asked, usage={"prompt_tokens": 25, "completion_tokens": 0}),
        log(**asked),
    ]
    assert [one.osl for one in read("openai", lines, 16)] == [1, 1, 4096]


def test_what_tools_are_called_with_is_part_of_a_prompt() -> None:
    def called(arguments: str) -> dict[str, Any]:
        function = {"name": "look", "arguments": arguments}
        return said(None, "assistant", tool_calls=[{"id": "1", "function": function}])

    def talk(arguments: str) -> bytes:
        return log(messages=[SYSTEM, said("Do."), called(arguments), said("r" * 400, "tool")])

    first, other = read("openai", [talk("x" * 90), talk("y" * 90)], 16)
    alike = [one == two for one, two in zip(first.blocks, other.blocks, strict=True)]
    assert alike == [True] * 5 + [False] * (len(alike) - 5), "up to the call"

    answer = {"choices": [{"message": called("z" * 300)}]}
    turn = [SYSTEM, said("Do.")]
    later = [*turn, called("z" * 300), said("r" * 400, "tool")]
    first, second = read("openai", [log(messages=turn, **answer), log(messages=later)], 16)
    assert len(first.blocks) > 8
    assert second.blocks[: len(first.blocks)] == first.blocks, (
        "a call that was answered is repeated"
    )


def test_other_tools_are_another_prompt() -> None:
    def talk(name: str) -> bytes:
        tools = [{"type": "function", "function": {"name": name, "description": 300 * name}}]
        return log(messages=[SYSTEM, said("Do.")], tools=tools)

    first, other, same = read("openai", [talk("f"), talk("g"), talk("f")], 16)
    assert first.blocks == same.blocks
    assert not set(first.blocks) & set(other.blocks), "they come first"


def test_another_picture_is_another_prompt_however_long_its_bytes_are() -> None:
    def shown(data: str) -> bytes:
        picture = {"type": "image_url", "image_url": {"url": data}}
        text = {"type": "text", "text": "What is this? " * 20}
        return log(messages=[SYSTEM, said([picture, text])])

    first, other, same = read("openai", [shown(10_000 * one) for one in "aba"], 16)
    assert first.blocks == same.blocks
    assert first.isl == other.isl < 200
    alike = [one == two for one, two in zip(first.blocks, other.blocks, strict=True)]
    assert alike == [True] * 4 + [False] * (len(alike) - 4)


def test_a_prompt_of_tokens_has_as_many() -> None:
    tokens = list(range(100_000, 100_040))
    lines = [log(prompt=one) for one in (tokens, [tokens], [*tokens[:32], *range(8)], ["x" * 160])]
    first, nested, other, text = read("openai", lines, 16)
    assert first.isl == nested.isl == other.isl == text.isl == 40
    assert first.blocks == nested.blocks == other.blocks
    assert not set(text.blocks) & set(first.blocks)


def test_the_responses_api_is_read_too() -> None:
    answer = {"type": "message", "role": "assistant", "content": [{"type": "x", "text": "w" * 200}]}
    call = {"type": "function_call", "name": "look", "arguments": "a" * 80}
    turn = [said([{"type": "input_text", "text": "Why? " * 40}])]
    later = [*turn, call, answer, {"type": "function_call_output", "output": "o" * 50}]
    usage = {"usage": {"input_tokens": 95, "output_tokens": 60}}
    lines = [
        log(instructions="i" * 160, input=turn, output=[call, answer], **usage),
        log(instructions="i" * 160, input=later, max_output_tokens=7),
        json.dumps({"created_at": 2, "input": "x" * 80, "output": [answer]}).encode(),
    ]
    first, second, plain = read("openai", lines, 16)
    assert (first.isl, first.osl) == (95, 60)
    assert second.blocks[: len(first.blocks)] == first.blocks
    assert len(first.blocks) > 95 // 16
    assert (second.osl, second.expected_osl) == (7, 7)
    assert (plain.isl, plain.osl) == (len("<user>" + "x" * 80 + "\n") // 4, 212 // 4)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [1, "b"]}, "neither text nor tokens"),
        ({"prompt": [1 << 40]}, "neither text nor tokens"),
        ({"timestamp": 1_763_800_000_500, "prompt": "x"}, "no time in seconds"),
        ({"prompt": "x", "usage": {"completion_tokens": -4}}, "negative"),
        ({"prompt": "x", "max_tokens": -4, "choices": [{"text": "y" * 9}]}, "negative"),
    ],
)
def test_a_log_line_that_would_be_misread_is_named(line: dict[str, Any], why: str) -> None:
    with pytest.raises(BadTrace, match=f"line 1: .*{why}"):
        read("openai", [log(**line)], 16)


def test_a_date_without_a_zone_does_not_depend_on_where_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dates = ("2026-03-08T01:59:59", "2026-03-08T03:00:01")  # New York skips an hour in between
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        came = read("openai", [log(prompt="x", timestamp=at) for at in dates], 16)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert came[1].arrival - came[0].arrival == 3602.0


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_line() -> None:
    (one,) = read("mooncake", [b"\xef\xbb\xbf" + MOONCAKE[0].rstrip() + b"\r\n", b"\r\n"])
    assert one.isl == 1100
