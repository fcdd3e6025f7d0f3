"""Recorded traffic as requests: traces of Mooncake and of agents, OpenAI-style logs, recordings.

A reader turns lines into requests and opens no files. New formats are added to `READERS`, where
`select-sim run --format NAME` finds them.
"""

from __future__ import annotations

from array import array
from codecs import BOM_UTF8
from datetime import UTC, datetime
from heapq import heappop, heappush
from itertools import count, islice
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from select_service.simulator.core.requests import ClientRequest, RequestOutcome, chain_of
from select_service.simulator.recordings import read_recording
from select_service.types import Milliseconds

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "MOONCAKE_BLOCK",
    "READERS",
    "RECORDING",
    "BadTrace",
    "TraceReader",
    "TraceWorkload",
    "in_order",
]

RECORDING: Final = "recording"

MOONCAKE_BLOCK: Final = 512
"""Tokens per hash id of Mooncake."""

AGENTS_BLOCK: Final = 64
"""Tokens per hash id in traces of agents, unless a program says otherwise."""

T = TypeVar("T")

CHARACTERS_PER_TOKEN: Final = 4
"""For logs that have the text instead of tokens."""


SPAN_MAX_S: Final = 366 * 86_400.0
"""Between the first and the last request of a trace: beyond, timestamps have another unit. Every
second of it is simulated."""

_END_MAX_S: Final = 2 * SPAN_MAX_S
"""Includes additions to a trace's own times: jitter, and a speed below 1."""

_SECONDS_MAX: Final = 1e11
"""Of a log's clock, three thousand years from now: larger values are milliseconds."""

_NAMES: Final = 1 << 64


class BadTrace(ValueError):
    """An unreadable line; the text names it, from 1."""


class TraceReader(Protocol):
    """Turns the lines of a file into requests with blocks of `block_size` tokens, in file order.

    Times may begin anywhere; `in_order` is applied afterwards.
    """

    def __call__(self, lines: Iterable[bytes], block_size: int) -> Iterator[ClientRequest]:
        """Read lazily.

        Raises:
            BadTrace: a line cannot be read.
            ValueError: the format has no blocks of that size.
        """


def in_order(requests: Iterable[ClientRequest]) -> list[ClientRequest]:
    """Return requests by arrival, the first at 0.

    Logs are written as answers end, and their clocks have any origin.

    Raises:
        BadTrace: they are years apart.
    """
    found = sorted(requests, key=lambda one: one.arrival)
    if not found:
        return found
    start = found[0].arrival
    first, last = found[0], found[-1]
    seconds = last.arrival - start
    if not seconds <= SPAN_MAX_S:
        raise BadTrace(
            f"lines {first.number} and {last.number}: requests are {seconds:.3g} s apart: do "
            "timestamps have another unit?"
        )
    for one in found:
        one.arrival -= start
    return found


class TraceWorkload:
    """A trace as a workload: each request at its time, `speed` times as fast.

    Clocks of traces are coarse (Mooncake's ticks every three seconds): `jitter_s` delays each
    request by up to that much, drawn from `rng`, to dissolve bursts that were never real.

    Attributes:
        total: Requests that will come.
    """

    def __init__(
        self,
        requests: Sequence[ClientRequest],
        block_size: int,
        rng: random.Random,
        *,
        speed: float = 1.0,
        jitter_s: float = 0.0,
        limit: int = 0,
    ) -> None:
        self.block_size = block_size
        self.total = min(limit or len(requests), len(requests))
        self._requests = islice(requests, self.total)
        self._rng = rng
        self._speed = speed
        self._jitter_s = jitter_s
        self._ahead = next(self._requests, None)
        # a heap: requests that others may still overtake
        self._shaken: list[tuple[float, int, ClientRequest]] = []

    def next(self) -> ClientRequest | None:
        """See Workload."""
        shaken = self._shaken
        while self._ahead is not None and (not shaken or self._ahead.arrival <= shaken[0][0]):
            one = self._ahead
            at = one.arrival + self._rng.random() * self._jitter_s
            heappush(shaken, (at, one.number, one))
            self._ahead = next(self._requests, None)
        if not shaken:
            return None
        at, _, request = heappop(shaken)
        request.arrival = at / self._speed
        if request.arrival > _END_MAX_S:
            raise BadTrace(
                f"line {request.number}: comes {request.arrival:.3g} s after the first at a speed "
                f"of {self._speed:.3g}; {_END_MAX_S:.0f} are simulated at most"
            )
        return request

    def after(self, outcome: RequestOutcome) -> tuple[ClientRequest, ...]:
        """Return nothing: a trace has its own times."""
        return ()


# -- Mooncake ------------------------------------------------------------------------------------


class _MooncakeLine(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_mooncake(
    lines: Iterable[bytes], block_size: int, trace_block_size: int = MOONCAKE_BLOCK
) -> Iterator[ClientRequest]:
    """See Reader.

    A hash id stands for `trace_block_size` tokens, and is split into whole blocks.
    """
    if trace_block_size % block_size:
        raise ValueError(
            f"blocks of {block_size} tokens are no part of the trace's, which have "
            f"{trace_block_size}"
        )
    parts = trace_block_size // block_size
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in _lines(lines):
        yield _hashed(_decoded(decoder, line, number), number, parts, block_size)


def _hashed(one: _MooncakeLine, number: int, parts: int, block_size: int) -> ClientRequest:
    """Return a request whose hash ids stand for `parts` blocks each."""
    _expect_sound(one, number, parts * block_size)
    return ClientRequest(
        number=number,
        arrival=one.timestamp / 1e3,
        isl=one.input_length,
        osl=max(1, one.output_length),
        blocks=_names(one.hash_ids, parts)[: one.input_length // block_size],
    )


def _expect_sound(one: _MooncakeLine, number: int, block_size: int) -> None:
    if one.input_length < 1:
        raise BadTrace(f"line {number}: input_length must be at least 1")
    if one.output_length < 0:
        raise BadTrace(f"line {number}: output_length must not be negative")
    if min(one.hash_ids, default=0) < 0:
        raise BadTrace(f"line {number}: hash_ids must not be negative")
    # one per block, of which the last may be partial or missing; a prompt may also have none, or
    # only a single one
    ids, full = len(one.hash_ids), one.input_length // block_size
    if ids > full + 2 or 1 < ids < full - 1:
        raise BadTrace(
            f"line {number}: {ids} hash_ids for an input_length of {one.input_length}: do they "
            f"stand for {block_size} tokens each (--trace-block-size)?"
        )


def _names(ids: list[int], parts: int) -> array[int]:
    """Return 64-bit block numbers; ids that are hashes themselves may need more bits."""
    if max(ids, default=0) < _NAMES // parts - 1:
        first = np.frombuffer(chain_of(ids), np.uint64) * parts
        each = np.arange(1, parts + 1, dtype=np.uint64)
        return array("Q", (first[:, None] + each).tobytes())
    numbers = [id_ * parts + part for id_ in ids for part in range(parts)]
    return chain_of(
        1 + number if number < _NAMES - 1 else xxh3_64_intdigest(b"%d" % number)
        for number in numbers
    )


# -- programs of agents --------------------------------------------------------------------------


class _AgentCall(msgspec.Struct):
    t: float  # seconds
    hash_ids: list[int]
    input_length: int = msgspec.field(name="in")
    output_length: int = msgspec.field(name="out")
    session_id: str | None = None


class _AgentProgram(msgspec.Struct):
    requests: list[_AgentCall]
    id: str | None = None
    block_size: int = AGENTS_BLOCK
    hash_id_scope: str = "global"


_is_program: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def read_agents(lines: Iterable[bytes], block_size: int) -> Iterator[ClientRequest]:
    """See Reader.

    A line is a call, with `t` (seconds), `in` and `out` (tokens), `hash_ids` and perhaps
    `session_id`; or a program, with its calls as `requests`, its `id`, which is their session, and
    perhaps `block_size` (64) and `hash_id_scope` (`local`: its ids mean nothing elsewhere).
    """
    calls, programs = msgspec.json.Decoder(_AgentCall), msgspec.json.Decoder(_AgentProgram)
    numbers = count(1)
    for number, line in _lines(lines):
        try:
            is_program = b'"requests"' in line and "requests" in _is_program(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            is_program = False  # said below
        if is_program:
            program = _decoded(programs, line, number)
        else:
            program = _AgentProgram([_decoded(calls, line, number)])
        if program.block_size < 1 or program.block_size % block_size:
            raise ValueError(
                f"blocks of {block_size} tokens are no part of those of line {number}, which have "
                f"{program.block_size}"
            )
        first = number << 32 if program.hash_id_scope == "local" else 0
        for call in program.requests:
            ids = [first + one if one >= 0 else one for one in call.hash_ids]
            one = _MooncakeLine(call.t * 1e3, call.input_length, call.output_length, ids)
            request = _hashed(one, number, program.block_size // block_size, block_size)
            request.number = next(numbers)
            request.session = call.session_id or program.id or ""
            yield request


# -- OpenAI-style logs ---------------------------------------------------------------------------


class _Message(msgspec.Struct):
    """A message of a chat, or an item of `input` and `output`, which may be a tool call."""

    role: str | None = None
    content: str | list[str | dict[str, object]] | None = None
    tool_calls: object = None
    type: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: object = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Body(msgspec.Struct):
    messages: list[_Message] | None = None
    prompt: str | list[str | int | list[int]] | None = None
    instructions: str | None = None
    input: str | list[_Message] | None = None
    tools: object = None
    user: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice] | None = None
    output: list[_Message] | None = None
    usage: _Usage | None = None


class _LogLine(_Body):
    timestamp: float | str | None = None  # seconds, or ISO 8601
    created: float | str | None = None
    created_at: float | str | None = None
    request: _Body | None = None
    response: _Reply | None = None
    choices: list[_Choice] | None = None
    output: list[_Message] | None = None
    usage: _Usage | None = None
    session_id: str | None = None
    slo_class: str | None = None
    slo_ttft_ms: Milliseconds | None = None


def read_openai(lines: Iterable[bytes], block_size: int) -> Iterator[ClientRequest]:
    """See Reader.

    A line has the members of a call (`messages`, `prompt` or `input`, `tools`, `user`,
    `max_tokens`), at the top or in `request`; those of the answer (`choices` or `output`, `usage`),
    at the top or in `response`; and `timestamp` (seconds or ISO 8601, UTC unless it has another
    zone), `created` or `created_at`. `session_id`, `slo_class` and `slo_ttft_ms` are those of
    `/select`. Prompts share prefixes as far as their text does, at four
    characters per token, and arguments of tools count as text; `usage` gives the lengths, if
    present.
    """
    decoder = msgspec.json.Decoder(_LogLine)
    start: float | None = None
    for number, line in _lines(lines):
        one = _decoded(decoder, line, number)
        when = _when(one, number)
        start = when if start is None else start
        yield _logged(one, number, when - start, block_size)


def _logged(one: _LogLine, number: int, arrival: float, block_size: int) -> ClientRequest:
    call: _Body = one.request or one
    reply = one.response or _Reply(one.choices, one.output, one.usage)
    usage = reply.usage or _Usage()
    text = _text_of(call, number)
    answer = _answer_of(reply)
    isl = usage.prompt_tokens or usage.input_tokens or _tokens(text)
    limit = call.max_completion_tokens or call.max_output_tokens or call.max_tokens
    said = usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens
    if said is None:
        said = _tokens(answer) if answer else limit or 1
    if isl < 1:
        raise BadTrace(f"line {number}: usage.prompt_tokens must not be negative")
    if min(said, limit or 0) < 0:
        raise BadTrace(f"line {number}: completion_tokens and max_tokens must not be negative")
    osl = max(1, said)
    size = block_size * CHARACTERS_PER_TOKEN
    blocks: list[int] = []
    before = 0
    whole = text + answer
    for begin in range(0, len(whole) - size + 1, size):
        piece = whole[begin : begin + size].encode()
        before = xxh3_64_intdigest(piece, seed=before)
        blocks.append(before)
    return ClientRequest(
        number=number,
        arrival=arrival,
        isl=isl,
        osl=osl,
        blocks=chain_of(blocks[: (isl + osl) // block_size]),
        session=one.session_id or call.user or "",
        slo_class=one.slo_class or "",
        slo_ttft_s=None if one.slo_ttft_ms is None else one.slo_ttft_ms / 1e3,
        expected_osl=limit,
    )


def _tokens(text: str) -> int:
    return max(1, len(text) // CHARACTERS_PER_TOKEN)


def _when(one: _LogLine, number: int) -> float:
    told = (one.timestamp, one.created, one.created_at)
    when = next((at for at in told if at is not None), None)
    if when is None:
        raise BadTrace(f"line {number}: no timestamp and no created")
    if isinstance(when, str):
        try:
            date = datetime.fromisoformat(when)
            return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            raise BadTrace(f"line {number}: timestamp is no date of ISO 8601") from None
    if when > _SECONDS_MAX:
        raise BadTrace(f"line {number}: timestamp {when:.0f} is no time in seconds")
    return when


def _text_of(call: _Body, number: int) -> str:
    """Return a prompt as one text, such that equal beginnings stay equal."""
    tools = _written(call.tools) if call.tools else ""
    if call.messages is not None:
        return tools + "".join(map(_said, call.messages))
    if call.input is not None:
        first = "" if call.instructions is None else f"<system>{call.instructions}\n"
        asked = call.input
        if isinstance(asked, str):
            asked = [_Message("user", asked)]
        return tools + first + "".join(map(_said, asked))
    prompt = call.prompt
    if isinstance(prompt, list):
        return _text_of_list(prompt, number)
    if prompt is not None:
        return prompt
    raise BadTrace(f"line {number}: no messages, no prompt and no input")


def _text_of_list(prompt: list[str | int | list[int]], number: int) -> str:
    """Return a prompt of tokens as text, with a token's number of characters for each."""
    first = prompt[0] if prompt else ""
    if not isinstance(first, int) and len(prompt) > 1:
        raise BadTrace(f"line {number}: several prompts in one call, which are several requests")
    if isinstance(first, str):
        return first
    tokens = prompt if isinstance(first, int) else first
    try:
        packed = array("I", cast("list[int]", tokens))
    except (TypeError, OverflowError):
        raise BadTrace(f"line {number}: prompt is neither text nor tokens") from None
    return packed.tobytes().decode("latin-1")


def _said(message: _Message) -> str:
    content = message.content
    if isinstance(content, list):
        content = "".join(map(_part, content))
    called = (message.tool_calls, message.name, message.arguments, message.output)
    more = "".join(_written(one) for one in called if one)
    return f"<{message.role or message.type or ''}>{content or ''}{more}\n"


def _part(part: str | dict[str, object]) -> str:
    """Return a part of a message; a picture becomes its digest, in the characters of one token."""
    if isinstance(part, str):
        return part
    text = part.get("text")
    if text is not None or part.keys() <= {"type", "text"}:
        return str(text or "")
    digest = xxh3_64_intdigest(_written(part).encode())
    return "".join(chr(0x10000 + (digest >> shift & 0xFFFF)) for shift in (0, 16, 32, 48))


def _written(one: object) -> str:
    return one if isinstance(one, str) else msgspec.json.encode(one, order="sorted").decode()


def _answer_of(reply: _Reply) -> str:
    """Return the answer in the form the next turn will repeat it."""
    if reply.output is not None:
        return "".join(map(_said, reply.output))
    if not reply.choices:
        return ""
    first = reply.choices[0]
    if first.message is not None:
        return _said(msgspec.structs.replace(first.message, role=first.message.role or "assistant"))
    return first.text or ""


def _lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(lines, 1):
        told = line.removeprefix(BOM_UTF8) if number == 1 else line
        if told.strip():
            yield number, told


def _decoded(decoder: msgspec.json.Decoder[T], line: bytes, number: int) -> T:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadTrace(f"line {number}: {error}") from None


READERS: Final[dict[str, TraceReader]] = {
    "agents": read_agents,
    "mooncake": read_mooncake,
    "openai": read_openai,
    RECORDING: read_recording,
}
