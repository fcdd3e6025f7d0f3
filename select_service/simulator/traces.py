"""Recorded traffic as requests: traces of Mooncake and of agents, OpenAI-style logs, recordings.

A reader turns lines into requests and opens no files. New formats are added to `READERS`, where
`select-sim run --format NAME` finds them; recordings consist of several files (`recordings.py`).
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush
from itertools import count, islice
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from select_service.simulator.core.requests import ClientRequest, RequestOutcome, chain_of
from select_service.simulator.openai_log import read_openai
from select_service.simulator.trace_lines import BadTrace, decoded, numbered

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = [
    "FORMATS",
    "MOONCAKE_BLOCK",
    "READERS",
    "RECORDING",
    "WITH_TARGETS",
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

SPAN_MAX_S: Final = 366 * 86_400.0
"""Between the first and the last request of a trace: beyond, timestamps have another unit. Every
second of it is simulated."""

_END_MAX_S: Final = 2 * SPAN_MAX_S
"""Includes additions to a trace's own times: jitter, and a speed below 1."""

_NAMES: Final = 1 << 64

TraceReader: TypeAlias = "Callable[[Iterable[bytes], int], Iterator[ClientRequest]]"
"""Turns the lines of a file lazily into requests with blocks of so many tokens, in file order.

Times may begin anywhere; `in_order` is applied afterwards. It raises BadTrace for a line that
cannot be read, and ValueError if the format has no blocks of that size.
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
    for number, line in numbered(lines):
        yield _hashed(decoded(decoder, line, number), number, parts, block_size)


def _hashed(
    one: _MooncakeLine,
    number: int,
    parts: int,
    block_size: int,
    names: tuple[str, str, str] = ("input_length", "output_length", "--trace-block-size"),
) -> ClientRequest:
    """Return a request whose hash ids stand for `parts` blocks each.

    `names` are what the format calls both lengths, and where it has the size of its blocks.
    """
    _expect_sound(one, number, parts * block_size, names)
    return ClientRequest(
        number=number,
        arrival=one.timestamp / 1e3,
        isl=one.input_length,
        osl=max(1, one.output_length),
        blocks=_names(one.hash_ids, parts)[: one.input_length // block_size],
    )


def _expect_sound(
    one: _MooncakeLine, number: int, block_size: int, names: tuple[str, str, str]
) -> None:
    isl, osl, size = names
    if one.input_length < 1:
        raise BadTrace(f"line {number}: {isl} must be at least 1")
    if one.output_length < 0:
        raise BadTrace(f"line {number}: {osl} must not be negative")
    if min(one.hash_ids, default=0) < 0:
        raise BadTrace(f"line {number}: hash_ids must not be negative")
    # one per block, of which the last may be partial or missing; a prompt may also have none, or
    # only a single one
    ids, full = len(one.hash_ids), one.input_length // block_size
    if ids > full + 2 or 1 < ids < full - 1:
        raise BadTrace(
            f"line {number}: {ids} hash_ids for an {isl} of {one.input_length}: do they "
            f"stand for {block_size} tokens each ({size})?"
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
    think_time: float | None = None  # seconds from the answer before it
    api_time: float | None = None  # that its answer took


class _Subagent(msgspec.Struct):
    requests: list[msgspec.Raw]
    agent_id: str = ""


class _AgentProgram(msgspec.Struct):
    requests: list[msgspec.Raw]  # calls, and subagents
    id: str | None = None
    block_size: int = AGENTS_BLOCK
    hash_id_scope: Literal["global", "local"] | None = None


class _Context(NamedTuple):
    """A call of a program."""

    session: str
    agent: int  # 0: the program itself; else the number of its subagent
    think_s: float
    call: _AgentCall


_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_call: Final = msgspec.json.Decoder(_AgentCall).decode
_subagent: Final = msgspec.json.Decoder(_Subagent).decode


def read_agents(lines: Iterable[bytes], block_size: int) -> Iterator[ClientRequest]:
    """See Reader.

    A line is a call, with `t` (seconds), `in` and `out` (tokens), `hash_ids` and perhaps
    `session_id` and `think_time`; or a program, with its calls as `requests`, its `id`, which is
    their session, and perhaps `block_size` (64) and `hash_id_scope` (`local`: its ids mean nothing
    elsewhere; absent: nor in its subagents). A call that has `requests` itself is a subagent, whose
    calls are a session of their own. Which model a call was for is not asked. Where a call of a
    program has no `think_time`, its `t` says when it came after the one before, whose `api_time` is
    taken off.
    """
    calls, programs = msgspec.json.Decoder(_AgentCall), msgspec.json.Decoder(_AgentProgram)
    numbers, scopes = count(1), dict[tuple[int, int], int]()
    for number, line in numbered(lines):
        found: Iterable[_Context]
        scope: str | None = "global"
        if _has_requests(line):
            program = decoded(programs, line, number)
            scope, where = program.hash_id_scope, f"line {number}: requests"
            found = _calls(program.requests, program.id or f"line {number}", where, count(1))
        else:
            program, call = _AgentProgram([]), decoded(calls, line, number)
            found = [_Context("", 0, call.think_time or 0.0, call)]
        if program.block_size < 1 or program.block_size % block_size:
            raise BadTrace(
                f"line {number}: its blocks of {program.block_size} tokens do not consist of those "
                f"of {block_size} that are simulated (--block-size)"
            )
        for session, agent, think_s, call in found:
            own = (number, 0 if scope == "local" else agent)
            first = 0 if scope == "global" else scopes.setdefault(own, len(scopes) + 1) << 32
            ids = [first + one if one >= 0 else one for one in call.hash_ids]
            one = _MooncakeLine(call.t * 1e3, call.input_length, call.output_length, ids)
            parts = program.block_size // block_size
            if not 0.0 <= think_s <= SPAN_MAX_S:
                raise BadTrace(f"line {number}: think_time must be from 0 to {SPAN_MAX_S:.0f}")
            request = _hashed(one, number, parts, block_size, ("in", "out", "block_size"))
            request.number = next(numbers)
            request.session = call.session_id or session
            request.think_s = think_s
            yield request


def _has_requests(text: bytes) -> bool:
    """Whether this is a program or a subagent; what cannot be read is neither."""
    try:
        return b'"requests"' in text and "requests" in _members(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _calls(
    requests: list[msgspec.Raw], session: str, where: str, agents: Iterator[int], number: int = 0
) -> Iterator[_Context]:
    """Yield calls with their sessions, those of a subagent at its place.

    Raises:
        BadTrace: one of them is neither; `where` is part of its text.
    """
    before: _AgentCall | None = None
    for at, one in enumerate(requests):
        text = bytes(one)
        try:
            if not _has_requests(text):
                call, think_s = _call(text), 0.0
                if call.think_time is not None:
                    think_s = call.think_time
                elif before is not None:
                    pause_s = call.t - before.t - max(0.0, before.api_time or 0.0)
                    think_s = min(max(0.0, pause_s), SPAN_MAX_S)  # `in_order` refuses such times
                yield _Context(session, number, think_s, call)
                before = call
                continue
            agent = _subagent(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadTrace(f"{where}[{at}]: {error}") from None
        own = f"{session}/{agent.agent_id or at}"
        yield from _calls(agent.requests, own, f"{where}[{at}].requests", agents, next(agents))


READERS: Final[dict[str, TraceReader]] = {
    "agents": read_agents,
    "mooncake": read_mooncake,
    "openai": read_openai,
}

FORMATS: Final = tuple(sorted((*READERS, RECORDING)))

WITH_TARGETS: Final = frozenset({"openai", RECORDING})
"""Formats in which a request may have a target of its own."""
