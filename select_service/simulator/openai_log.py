"""OpenAI-style logs as requests: bodies with their answers, one JSON object a line."""

from __future__ import annotations

from array import array
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, cast

import msgspec
from xxhash import xxh3_64_intdigest

from select_service.simulator.core.requests import ClientRequest, chain_of
from select_service.simulator.trace_lines import BadTrace, decoded, numbered
from select_service.types import Milliseconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CHARACTERS_PER_TOKEN: Final = 4
"""For logs that have the text instead of tokens."""

_SECONDS_MAX: Final = 1e11
"""Of a log's clock, three thousand years from now: larger values are milliseconds."""


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
    for number, line in numbered(lines):
        one = decoded(decoder, line, number)
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
    tokens = usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens
    if tokens is None:
        tokens = _tokens(answer) if answer else limit or 1
    if isl < 1:
        raise BadTrace(f"line {number}: usage.prompt_tokens must not be negative")
    if min(tokens, limit or 0) < 0:
        raise BadTrace(f"line {number}: completion_tokens and max_tokens must not be negative")
    osl = max(1, tokens)
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
    times = (one.timestamp, one.created, one.created_at)
    when = next((at for at in times if at is not None), None)
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
        return tools + "".join(map(_message_text, call.messages))
    if call.input is not None:
        first = "" if call.instructions is None else f"<system>{call.instructions}\n"
        asked = call.input
        if isinstance(asked, str):
            asked = [_Message("user", asked)]
        return tools + first + "".join(map(_message_text, asked))
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


def _message_text(message: _Message) -> str:
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
        return "".join(map(_message_text, reply.output))
    if not reply.choices:
        return ""
    first = reply.choices[0]
    if first.message is not None:
        return _message_text(
            msgspec.structs.replace(first.message, role=first.message.role or "assistant")
        )
    return first.text or ""
