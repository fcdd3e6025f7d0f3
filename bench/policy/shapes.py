"""Traffic in the shapes of public traces, as lines in Mooncake's format: nothing was chosen on it.

Each shape is drawn after what its source publishes of lengths, sharing and arrivals, at a rate that
is asked for: a user that thinks for twenty seconds does so on a large fleet, too, which a trace
that is played faster would not have.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush, merge
from itertools import accumulate, count, islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from select_service.simulator.core import workloads
from select_service.simulator.traces import MOONCAKE_BLOCK

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

__all__ = ["SHAPES", "Line", "drawn", "write"]

TOKENS_MAX: Final = 128_000

TOKEN_S: Final = 0.02
"""For a token of an answer, as far as the next request is concerned."""

WARM_S: Final = 120.0
"""For so long sessions begin before the trace does: from the first second on some are in their
tenth turn."""


class Line(NamedTuple):
    """One request; `hash_ids` name its blocks of 512 tokens, the last of them begun only."""

    at_s: float
    isl: int
    osl: int
    hash_ids: tuple[int, ...]


class _Draw:
    """Numbers as traces have them, and names for blocks."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._names = count()

    def blocks(self, tokens: int) -> tuple[int, ...]:
        """Return new names for so many tokens, the last block begun only."""
        return tuple(next(self._names) for _ in range(-(-tokens // MOONCAKE_BLOCK)))

    def length(self, median: float, sigma: float, most: int, least: int = 8) -> int:
        """Return a log-normal length."""
        return int(min(most, max(least, self.rng.lognormvariate(math.log(median), sigma))))

    def whole(self, low: int, high: int) -> tuple[int, ...]:
        """Return new whole blocks, of lengths even on a logarithmic scale."""
        tokens = math.exp(self.rng.uniform(math.log(low), math.log(high)))
        return self.blocks(max(1, round(tokens / MOONCAKE_BLOCK)) * MOONCAKE_BLOCK)

    def line(self, at_s: float, shared: Sequence[int], own: int, osl: int) -> Line:
        """Return a request: whole blocks that others have, too, then tokens of its own."""
        ids = (*shared, *self.blocks(own))
        return Line(at_s, len(shared) * MOONCAKE_BLOCK + own, osl, ids)

    def poisson(self, rate: float) -> Iterator[float]:
        """Return when sessions begin; some did before the trace does."""
        return (at - WARM_S for at in workloads.poisson(self.rng, rate))

    def question(self, at_s: float, shared: Sequence[int]) -> Line:
        """Return a short question to what others ask about, too."""
        return self.line(at_s, shared, self.length(50, 0.5, 300), self.length(60, 0.9, 500))

    def turns(
        self, at_s: float, system: tuple[int, ...], turns: int, lengths: _Lengths
    ) -> Iterator[Line]:
        """One conversation: each prompt is the last one, its answer, and something new."""
        tokens, ids = len(system) * MOONCAKE_BLOCK, system
        for _ in range(turns):
            tokens += self.length(lengths.asked, 1.0, 8_000)
            if tokens > TOKENS_MAX:
                return
            ids += self.blocks(tokens - len(ids) * MOONCAKE_BLOCK)
            osl = self.length(lengths.output, 0.9, 2_000)
            yield Line(at_s, tokens, osl, ids)
            tokens += osl
            at_s += osl * TOKEN_S + self.rng.expovariate(1 / lengths.pause_s)


class _Lengths(NamedTuple):
    """Of the turns of a conversation."""

    asked: float  # tokens, median
    output: float
    pause_s: float  # mean


_TOOLS: Final = _Lengths(asked=2_200, output=130, pause_s=2.0)
_CHAT: Final = _Lengths(asked=120, output=210, pause_s=20.0)


def _zipf(number: int, power: float) -> list[float]:
    """Return how often each of so many is asked for."""
    return [1.0 / (rank + 1) ** power for rank in range(number)]


# Each yields sessions in the order they begin, and the lines of a session in theirs.


def toolagent(draw: _Draw, rate: float) -> Iterator[Iterable[Line]]:
    """Mooncake's tool and agent trace: 8,600 tokens of prompt, 180 of answer, 59 % of it shared."""
    tools = [draw.whole(2_048, 10_240) for _ in range(80)]
    often = _zipf(len(tools), 1.0)
    for at in draw.poisson(rate / 2):
        tool = draw.rng.choices(tools, often)[0]
        yield draw.turns(at, tool, draw.rng.choice((1, 1, 1, 2, 3, 4)), _TOOLS)


def synthetic(draw: _Draw, rate: float) -> Iterator[Iterable[Line]]:
    """Mooncake's synthetic trace: chats, exams and long documents in one, 15,000 tokens."""
    for at in draw.poisson(rate / 4.6):
        kind = draw.rng.random()
        if kind < _CHATS:
            yield draw.turns(at, (), draw.rng.randint(2, 8), _CHAT)
        else:
            least, most = (4_096, 32_768) if kind < 2 * _CHATS else (24_576, 98_304)
            yield _questions(draw, at, draw.whole(least, most), draw.rng.randint(2, 7), 20.0)


_CHATS: Final = 0.4
"""Share of the synthetic trace's sessions, and of its exams."""


def _questions(
    draw: _Draw, at: float, document: tuple[int, ...], number: int, pause_s: float
) -> Iterator[Line]:
    for _ in range(number):
        yield draw.question(at, document)
        at += draw.rng.expovariate(1 / pause_s)


def documents(draw: _Draw, rate: float) -> Iterator[Iterable[Line]]:
    """LooGLE: papers of 16,000 to 100,000 tokens, a handful of questions to each in a minute."""
    for at in draw.poisson(rate / 7):
        yield _questions(draw, at, draw.whole(16_384, 100_352), draw.rng.randint(4, 10), 6.0)


def questions_at_once(draw: _Draw, rate: float) -> Iterator[Iterable[Line]]:
    """The same papers, all questions to one of them within a second."""
    for at in draw.poisson(rate / 7):
        yield _questions(draw, at, draw.whole(16_384, 100_352), draw.rng.randint(4, 10), 0.15)


def single_chats(draw: _Draw, rate: float) -> Iterator[Iterable[Line]]:
    """ShareGPT, one turn: nothing is shared."""
    for at in draw.poisson(rate):
        yield (draw.line(at, (), draw.length(170, 1.2, 4_000), draw.length(210, 0.9, 1_500)),)


def conversations(draw: _Draw, rate: float) -> Iterator[Iterable[Line]]:
    """ShareGPT, whole conversations behind one of five system prompts."""
    systems = [draw.whole(512, 2_048) for _ in range(5)]
    for at in draw.poisson(rate / 5):
        turns = min(30, 1 + int(draw.rng.expovariate(1 / 4.5)))
        yield draw.turns(at, draw.rng.choice(systems), turns, _CHAT)


def code(draw: _Draw, rate: float) -> Iterator[Iterable[Line]]:
    """Azure, completions of code: 2,000 tokens, a tail to 32,000, a dozen out, nothing shared."""
    for at in draw.poisson(rate):
        yield (draw.line(at, (), draw.length(2_000, 1.1, 32_000), draw.length(14, 0.7, 300)),)


def azure_conversations(draw: _Draw, rate: float) -> Iterator[Iterable[Line]]:
    """Azure, conversations: 1,000 tokens, 200 out, nothing that is known to be shared."""
    for at in draw.poisson(rate):
        yield (draw.line(at, (), draw.length(1_000, 0.9, 14_000), draw.length(130, 0.9, 1_500)),)


def bursty(cv: float) -> Callable[[_Draw, float], Iterator[Iterable[Line]]]:
    """BurstGPT: short conversations whose gaps have such a coefficient of variation."""

    def shape(draw: _Draw, rate: float) -> Iterator[Iterable[Line]]:
        systems = [draw.whole(512, 2_048) for _ in range(8)]
        often = _zipf(len(systems), 1.0)
        for at in workloads.gamma(draw.rng, rate, cv):
            system = draw.rng.choices(systems, often)[0]
            own, osl = draw.length(350, 1.1, 6_000), draw.length(200, 0.9, 1_500)
            yield (draw.line(at, system, own, osl),)

    return shape


def system_prompts(draw: _Draw, rate: float) -> Iterator[Iterable[Line]]:
    """Sixty applications, each with instructions of its own length, and short questions to them."""
    systems = [draw.blocks(draw.rng.choice((512, 1_536, 3_072, 15_360))) for _ in range(60)]
    often = _zipf(len(systems), 1.0)
    for at in draw.poisson(rate):
        system = draw.rng.choices(systems, often)[0]
        yield (draw.line(at, system, draw.length(400, 0.8, 2_000), draw.length(150, 0.9, 1_500)),)


def reasoning(draw: _Draw, rate: float) -> Iterator[Iterable[Line]]:
    """Short questions, 8,000 to 20,000 tokens of thought: decoding is all there is."""
    for at in draw.poisson(rate):
        yield (draw.line(at, (), draw.length(450, 0.6, 3_000), draw.rng.randint(8_000, 20_000)),)


def retrieval(draw: _Draw, rate: float) -> Iterator[Iterable[Line]]:
    """RAG: documents by Zipf 1.1 in the order they were found, so prefixes are shared by chance."""
    system = draw.blocks(MOONCAKE_BLOCK)
    found = [math.exp(draw.rng.uniform(math.log(512), math.log(2_048))) for _ in range(3_000)]
    often = list(accumulate(_zipf(len(found), 1.1)))
    named: dict[tuple[int, ...], tuple[int, ...]] = {(): system}  # equal number, equal prefix
    for at in draw.poisson(rate):
        picked: tuple[int, ...] = ()
        ids = system
        for document in dict.fromkeys(draw.rng.choices(range(3_000), cum_weights=often, k=4)):
            picked += (document,)
            if picked not in named:
                blocks = round(found[document] / MOONCAKE_BLOCK)
                named[picked] = ids + draw.blocks(blocks * MOONCAKE_BLOCK)
            ids = named[picked]
        yield (draw.line(at, ids, draw.length(60, 0.6, 500), draw.length(220, 0.7, 1_000)),)


def best_of_n(draw: _Draw, rate: float) -> Iterator[Iterable[Line]]:
    """8 to 64 answers to one prompt, all in one instant."""
    for at in draw.poisson(rate / 30):
        first = draw.line(at, draw.whole(512, 8_192), draw.length(100, 0.7, 500), 1)
        number = draw.rng.choice((8, 16, 32, 64))
        yield [first._replace(osl=draw.length(400, 0.6, 2_000)) for _ in range(number)]


def flood(draw: _Draw, rate: float) -> Iterator[Iterable[Line]]:
    """Conversations, and a third of all requests in batch jobs that come in one instant each."""
    instructions = draw.whole(1_024, 2_048)
    due = FLOOD_S / 3
    for session in conversations(draw, rate * 2 / 3):
        lines = list(session)
        if lines and lines[0].at_s >= due:
            yield [
                draw.line(
                    due, instructions, draw.length(2_500, 0.6, 12_000), draw.length(80, 0.6, 400)
                )
                for _ in range(int(rate / 3 * FLOOD_S))
            ]
            due += FLOOD_S
        yield lines


FLOOD_S: Final = 90.0
"""Between two batch jobs."""


def mixture(draw: _Draw, rate: float) -> Iterator[Iterable[Line]]:
    """Tools, conversations, code and papers on one fleet."""
    parts = ((toolagent, 0.3), (conversations, 0.3), (code, 0.3), (documents, 0.1))
    return ((line,) for line in merge(*(_flat(shape(draw, rate * part)) for shape, part in parts)))


SHAPES: Final[dict[str, Callable[[_Draw, float], Iterator[Iterable[Line]]]]] = {
    "toolagent": toolagent,
    "synthetic": synthetic,
    "documents": documents,
    "questions at once": questions_at_once,
    "single chats": single_chats,
    "conversations": conversations,
    "code": code,
    "azure conversations": azure_conversations,
    "bursts, cv 4": bursty(4.0),
    "bursts, cv 8": bursty(8.0),
    "system prompts": system_prompts,
    "reasoning": reasoning,
    "retrieval": retrieval,
    "best of n": best_of_n,
    "flood": flood,
    "mixture": mixture,
}


def _flat(sessions: Iterator[Iterable[Line]]) -> Iterator[Line]:
    """Return the lines of all sessions in order of arrival."""
    ahead: list[tuple[float, int, Line, Iterator[Line]]] = []
    numbers = count()
    for session in sessions:
        lines = iter(session)
        first = next(lines, None)
        if first is None:
            continue
        while ahead and ahead[0][0] <= first.at_s:
            yield _popped(ahead, numbers)
        heappush(ahead, (first.at_s, next(numbers), first, lines))
    while ahead:
        yield _popped(ahead, numbers)


def _popped(ahead: list[tuple[float, int, Line, Iterator[Line]]], numbers: Iterator[int]) -> Line:
    _, _, line, lines = heappop(ahead)
    after = next(lines, None)
    if after is not None:
        heappush(ahead, (after.at_s, next(numbers), after, lines))
    return line


def drawn(name: str, rng: random.Random, requests: int, rate: float) -> list[Line]:
    """Return so many requests of a shape, in order of arrival, the first after 0.

    Args:
        name: of the shape.
        rng: decides about all of it.
        requests: how many.
        rate: of requests a second; of sessions the mean, so that it is met about.
    """
    lines = _flat(SHAPES[name](_Draw(rng), rate))
    return list(islice((line for line in lines if line.at_s >= 0.0), requests))


def write(lines: Sequence[Line], path: Path) -> None:
    """Write a trace as Mooncake does."""
    encode = msgspec.json.encode
    path.write_bytes(
        b"".join(
            encode(
                {
                    "timestamp": round(one.at_s * 1e3, 3),
                    "input_length": one.isl,
                    "output_length": one.osl,
                    "hash_ids": one.hash_ids,
                }
            )
            + b"\n"
            for one in lines
        )
    )
