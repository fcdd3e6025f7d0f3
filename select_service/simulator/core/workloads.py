"""Synthetic requests: sessions of chats and agents, shared prompts, RL batches, mixtures.

A session's context grows turn by turn, and a block of it has the same number in every turn: the
next prompt finds what the last answer left. Sessions begin at given times (open loop), or each of a
fixed number of users begins a new one when the last has ended (closed loop).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from select_service.simulator.core.requests import ClientRequest, RequestOutcome, chain_of

if TYPE_CHECKING:
    import random
    from array import array
    from collections.abc import Iterator, Sequence

    from select_service.simulator.core.requests import Workload


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Independent arrivals, `rate` per second."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def gamma(rng: random.Random, rate: float, cv: float) -> Iterator[float]:
    """Gaps with coefficient of variation `cv`: 1 is Poisson, above is burstier, below more even."""
    shape = 1.0 / (cv * cv)
    now = 0.0
    while True:
        now += rng.gammavariate(shape, 1.0 / (shape * rate))
        yield now


def bursts(rng: random.Random, rate: float, size: int) -> Iterator[float]:
    """Bursts of `size` simultaneous arrivals, `rate` per second on average."""
    for now in poisson(rng, rate / size):
        for _ in range(size):
            yield now


def diurnal(
    rng: random.Random, times: Iterator[float], period_s: float, depth: float
) -> Iterator[float]:
    """Thin arrivals so that their rate oscillates between all and `1 - depth` of it."""
    for now in times:
        share = 1.0 - depth * (1.0 - math.cos(2.0 * math.pi * now / period_s)) / 2.0
        if rng.random() < share:
            yield now


Kind = Literal["chat", "agents", "shared-prompts", "rl"]


TOKENS_MAX: Final = 10_000_000
"""Maximum mean length of a part of a prompt, or of an answer: more than any context holds."""

TURNS_MAX: Final = 10_000
"""Maximum mean turns of a session; all of them are drawn when it begins."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of sessions of a kind; means, lengths in tokens."""

    prompts: int  # distinct system prompts, the n-th 1/n times as frequent as the first
    prompt_tokens: int
    turn_tokens: int  # added by each turn: a question, a tool's output
    output_tokens: int
    turns: float
    think_s: float  # from an answer to the next turn


KINDS: Final[dict[Kind, Shape]] = {
    "chat": Shape(
        prompts=8, prompt_tokens=1_000, turn_tokens=200, output_tokens=300, turns=5.0, think_s=20.0
    ),
    "agents": Shape(
        prompts=4,
        prompt_tokens=6_000,
        turn_tokens=1_500,
        output_tokens=150,
        turns=12.0,
        think_s=2.0,
    ),
    "shared-prompts": Shape(
        prompts=64, prompt_tokens=4_000, turn_tokens=400, output_tokens=200, turns=1.0, think_s=0.0
    ),
    "rl": Shape(
        prompts=16, prompt_tokens=2_000, turn_tokens=0, output_tokens=800, turns=1.0, think_s=5.0
    ),
}


class WorkloadSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One synthetic workload; None takes the value of its kind."""

    kind: Kind = "chat"
    arrivals: Literal["poisson", "gamma", "bursts", "closed"] = "poisson"  # of sessions
    rate: float = 1.0  # sessions per second; requests per second are `turns` times that
    cv: float = 2.0  # of gamma
    burst_size: int = 16
    users: int = 64  # of a closed loop
    diurnal_period_s: float = 0.0  # 0: the rate is constant
    diurnal_depth: float = 0.8
    requests: int = 10_000  # after that no more sessions begin
    prompts: int | None = None
    prompt_tokens: int | None = None
    turn_tokens: int | None = None
    output_tokens: int | None = None
    turns: float | None = None
    think_s: float | None = None
    samples: int = 16  # of each prompt of an rl batch; `prompts` is the number of groups
    tells_output: bool = False  # whether requests state the length of their answers
    tenant: str = ""
    slo_class: str = ""
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None

    @property
    def shape(self) -> Shape:
        """The shape of its kind, with the given values replaced."""
        given = {
            name: value
            for name in Shape.__struct_fields__
            if (value := getattr(self, name)) is not None
        }
        return msgspec.structs.replace(KINDS[self.kind], **given)

    @property
    def has_rate(self) -> bool:
        """Whether sessions begin at a rate of their own, and not when others end."""
        return self.kind != "rl" and self.arrivals != "closed"

    def check(self) -> None:
        """Refuse settings that cannot be drawn from.

        Raises:
            ValueError: naming it.
        """
        shape = self.shape
        for owner in (self, shape):
            for name in owner.__struct_fields__:
                value = getattr(owner, name)
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if is_number and not 0.0 <= value < math.inf:
                    raise ValueError(f"{name} must be at least 0")
        for name in ("rate", "cv", "burst_size", "users", "requests", "samples"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        if shape.prompts < 1 or shape.output_tokens < 1 or shape.turns < 1.0:
            raise ValueError("prompts, output_tokens and turns must be at least 1")
        if shape.prompt_tokens + shape.turn_tokens < 1:
            raise ValueError("prompt_tokens and turn_tokens must not both be 0")
        lengths = (shape.prompt_tokens, shape.turn_tokens, shape.output_tokens)
        if max(lengths) > TOKENS_MAX or shape.turns > TURNS_MAX:
            raise ValueError(
                f"lengths may be {TOKENS_MAX:,} tokens at most, and sessions {TURNS_MAX:,} turns"
            )
        if self.diurnal_depth > 1.0:
            raise ValueError("diurnal_depth must be at most 1")


class _Turn(NamedTuple):
    """A turn's addition to the context, and the think time before it."""

    tokens: int
    output: int
    think_s: float


@dataclass(slots=True)
class _Session:
    """One conversation: its name, its context, and its remaining turns, last first.

    All turns are drawn at its beginning, so that they do not depend on the policy.
    """

    name: str
    tokens: int
    blocks: array[int]
    turns: list[_Turn]


class _Names:
    """Unique numbers of blocks and requests within a run."""

    def __init__(self) -> None:
        self.block = 1  # the next
        self.requests = count()
        self.sessions = count()


class _Author:
    """Generates sessions of one shape."""

    def __init__(
        self, settings: WorkloadSettings, block_size: int, rng: random.Random, names: _Names
    ) -> None:
        settings.check()
        self.settings = settings
        self.shape = shape = settings.shape
        self.rng = rng
        self.names = names
        self._block_size = block_size
        self._prompts: list[tuple[int, array[int]]] = []
        self._weights: list[float] = []
        total = 0.0
        for number in range(shape.prompts):
            tokens = self.draw(shape.prompt_tokens, 0.3)
            self._prompts.append((tokens, self._blocks(tokens // block_size)))
            total += 1.0 / (number + 1)
            self._weights.append(total)

    def _blocks(self, number: int) -> array[int]:
        names, number = self.names, max(number, 0)
        first, names.block = names.block, names.block + number
        return chain_of(range(first, names.block))

    def draw(self, mean: float, sigma: float = 0.7) -> int:
        """Return a log-normal length with this mean; 0 for a mean of 0."""
        if not mean:
            return 0
        return max(1, round(self.rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))

    def open(self, most: int, prompt: int | None = None) -> _Session:
        """Begin a session of at most `most` turns, with the given or a random system prompt."""
        if prompt is None:
            prompt = self.rng.choices(range(len(self._prompts)), cum_weights=self._weights)[0]
        tokens, blocks = self._prompts[prompt]
        turns = [self._turn()]
        while self.rng.random() >= 1.0 / self.shape.turns:
            turns.append(self._turn())
        name = f"{self.settings.tenant}#{next(self.names.sessions)}"
        return _Session(name, tokens, blocks[:], turns[most - 1 :: -1] if most else [])

    def _turn(self) -> _Turn:
        shape = self.shape
        think_s = self.rng.expovariate(1.0 / shape.think_s) if shape.think_s else 0.0
        return _Turn(self.draw(shape.turn_tokens), self.draw(shape.output_tokens), think_s)

    def write(self, session: _Session, now: float) -> ClientRequest:
        """Return the next request of a session; its context then includes the answer, too."""
        settings, turn = self.settings, session.turns.pop()
        isl, osl = session.tokens + turn.tokens, turn.output
        session.tokens = isl + osl
        # the last token is cached only with the next turn
        full = (isl + osl) // self._block_size
        session.blocks += self._blocks(full - len(session.blocks))
        return ClientRequest(
            number=next(self.names.requests),
            arrival=now,
            isl=isl,
            osl=osl,
            blocks=session.blocks[:],
            session=session.name,
            tenant=settings.tenant,
            slo_class=settings.slo_class,
            slo_ttft_s=settings.slo_ttft_s,
            slo_itl_s=settings.slo_itl_s,
            expected_osl=osl if settings.tells_output else None,
        )


class SessionWorkload:
    """Chats, agents, single prompts: consecutive requests in each session."""

    def __init__(
        self,
        settings: WorkloadSettings,
        block_size: int,
        rng: random.Random,
        names: _Names | None = None,
    ) -> None:
        self.block_size = block_size
        self._settings = settings
        self._author = _Author(settings, block_size, rng, names or _Names())
        self._left = settings.requests
        self._open: dict[int, _Session] = {}  # by the number of the request in progress
        self._is_closed = settings.arrivals == "closed"
        self._times = _times(settings, rng)
        self._users = self._first_requests(rng) if self._is_closed else []

    def next(self) -> ClientRequest | None:
        """See Workload."""
        if self._is_closed:
            return self._users.pop() if self._users else None
        return self._begin(next(self._times)) if self._left > 0 else None

    def after(self, outcome: RequestOutcome) -> list[ClientRequest]:
        """See Workload: the next turn; in a closed loop, the user's next session."""
        session = self._open.pop(outcome.request.number)
        if session.turns and outcome.is_ok:
            return [self._go_on(session, outcome.finished + session.turns[-1].think_s)]
        if self._is_closed and self._left > 0:
            return [self._begin(outcome.finished)]
        return []

    def _first_requests(self, rng: random.Random) -> list[ClientRequest]:
        """Return the first request of each user of a closed loop, last first.

        Users come within a second, not all at once; one that thinks for less time asks sooner.
        """
        times = sorted(rng.random() for _ in range(self._settings.users))
        begun = [self._begin(now) for now in times if self._left > 0]
        return sorted(begun, key=lambda one: one.arrival, reverse=True)

    def _begin(self, now: float) -> ClientRequest:
        session = self._author.open(self._left)
        self._left -= len(session.turns)
        if self._is_closed:
            now += session.turns[-1].think_s
        return self._go_on(session, now)

    def _go_on(self, session: _Session, now: float) -> ClientRequest:
        request = self._author.write(session, now)
        self._open[request.number] = session
        return request


class BatchWorkload:
    """RL: groups of samples of one prompt each, all at once; the next batch when all have ended."""

    def __init__(
        self,
        settings: WorkloadSettings,
        block_size: int,
        rng: random.Random,
        names: _Names | None = None,
    ) -> None:
        self.block_size = block_size
        self._settings = settings
        self._names = names or _Names()
        self._rng = rng
        self._left = settings.requests
        self._under_way = 0
        self._queue: list[ClientRequest] = []  # of the batch, last first
        self._queue = self._batch(0.0)

    def _batch(self, now: float) -> list[ClientRequest]:
        author = _Author(self._settings, self.block_size, self._rng, self._names)
        batch: list[ClientRequest] = []
        for group in range(author.shape.prompts):
            for _ in range(self._settings.samples):
                if len(batch) < self._left:
                    batch.append(author.write(author.open(1, group), now))
        self._left -= len(batch)
        self._under_way += len(batch)
        return batch[::-1]

    def next(self) -> ClientRequest | None:
        """See Workload."""
        return self._queue.pop() if self._queue else None

    def after(self, outcome: RequestOutcome) -> list[ClientRequest]:
        """See Workload: the whole next batch, once the last request of this one has ended."""
        self._under_way -= 1
        if self._under_way or self._left <= 0:
            return []
        think_s = self._settings.shape.think_s
        return self._batch(outcome.finished + think_s)[::-1]


class Mix:
    """Several workloads in parallel: tenants, classes."""

    def __init__(self, parts: Sequence[Workload]) -> None:
        self.block_size = parts[0].block_size
        self._parts = parts
        self._heads = [part.next() for part in parts]
        self._owner: dict[int, Workload] = {}

    def next(self) -> ClientRequest | None:
        """See Workload."""
        heads = [(head.arrival, at) for at, head in enumerate(self._heads) if head is not None]
        if not heads:
            return None
        at = min(heads)[1]
        head, self._heads[at] = self._heads[at], self._parts[at].next()
        assert head is not None
        self._owner[head.number] = self._parts[at]
        return head

    def after(self, outcome: RequestOutcome) -> list[ClientRequest]:
        """See Workload."""
        owner = self._owner.pop(outcome.request.number)
        brought = list(owner.after(outcome))
        for request in brought:
            self._owner[request.number] = owner
        return brought


def workload_of(
    settings: Sequence[WorkloadSettings], block_size: int, rngs: Sequence[random.Random]
) -> Workload:
    """Return one workload of all these, each with its own rng.

    Raises:
        ValueError: settings make no sense.
    """
    names = _Names()
    parts: list[Workload] = []
    for one, rng in zip(settings, rngs, strict=True):
        one.check()
        kind = BatchWorkload if one.kind == "rl" else SessionWorkload
        parts.append(kind(one, block_size, rng, names))
    return parts[0] if len(parts) == 1 else Mix(parts)


def _times(settings: WorkloadSettings, rng: random.Random) -> Iterator[float]:
    if settings.arrivals == "gamma":
        times = gamma(rng, settings.rate, settings.cv)
    elif settings.arrivals == "bursts":
        times = bursts(rng, settings.rate, settings.burst_size)
    else:
        times = poisson(rng, settings.rate)
    if settings.diurnal_period_s:
        return diurnal(rng, times, settings.diurnal_period_s, settings.diurnal_depth)
    return times
