"""Seeded multi-turn chat: the prompts, the lengths of answers, the pauses in between.

Prompts grow as real ones do: a system prompt shared by many conversations, then the history, then
the new message. Token ids are random numbers, since only their equality matters here. Pure: the
caller supplies the generator and does the waiting.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

_VOCABULARY = 128_000


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Ranges of the traffic, in tokens and seconds; both ends included."""

    system_prompts: int = 6
    system_tokens: tuple[int, int] = (128, 768)
    message_tokens: tuple[int, int] = (16, 192)
    answer_tokens: tuple[int, int] = (24, 128)
    turns: tuple[int, int] = (1, 7)
    think_mean_s: float = 1.0

    @property
    def turns_mean(self) -> float:
        """Mean number of turns of a conversation."""
        return sum(self.turns) / 2


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: think, then send `prompt`; the engine will answer `answer`."""

    think_s: float
    prompt: list[int]
    answer: list[int]


@dataclass(slots=True)
class Conversation:
    """A growing history with a known end."""

    shape: ChatShape
    rng: Random
    history: list[int]
    turns_left: int
    _first: bool = field(default=True)

    def next_turn(self) -> Turn | None:
        """Return the next request, None when the conversation is over; extends the history."""
        if self.turns_left == 0:
            return None
        self.turns_left -= 1
        think_s = 0.0 if self._first else self.rng.expovariate(1 / self.shape.think_mean_s)
        self._first = False
        self.history += _tokens(self.rng, self.shape.message_tokens)
        answer = _tokens(self.rng, self.shape.answer_tokens)
        turn = Turn(think_s, list(self.history), answer)
        self.history += answer
        return turn


def system_prompts(shape: ChatShape, rng: Random) -> list[list[int]]:
    """Return the prompts that conversations share."""
    return [_tokens(rng, shape.system_tokens) for _ in range(shape.system_prompts)]


def new_conversation(shape: ChatShape, rng: Random, systems: list[list[int]]) -> Conversation:
    """Return a conversation under one of the system prompts; earlier ones are more popular."""
    popularity = [1 / (1 + index) for index in range(len(systems))]
    system = rng.choices(systems, popularity)[0]
    return Conversation(shape, rng, list(system), rng.randint(*shape.turns))


def _tokens(rng: Random, length: tuple[int, int]) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(rng.randint(*length))]
