"""Seeded traffic: same seed, same words; histories grow."""

from __future__ import annotations

import itertools
from random import Random

from select_service.demo.session import ChatShape, Turn, new_conversation, system_prompts

SHAPE = ChatShape(system_tokens=(5, 5), message_tokens=(2, 3), answer_tokens=(1, 4), turns=(3, 3))


def talk(seed: int) -> tuple[list[list[int]], list[Turn]]:
    rng = Random(seed)
    systems = system_prompts(SHAPE, rng)
    conversation = new_conversation(SHAPE, rng, systems)
    turns = []
    while (turn := conversation.next_turn()) is not None:
        turns.append(turn)
    return systems, turns


def test_same_seed_same_conversation() -> None:
    assert talk(5) == talk(5)
    assert talk(5) != talk(6)


def test_every_prompt_starts_with_the_one_before_and_its_answer() -> None:
    systems, turns = talk(1)
    assert len(turns) == 3
    assert turns[0].prompt[:5] in systems
    assert turns[0].think_s == 0.0
    for before, after in itertools.pairwise(turns):
        history = before.prompt + before.answer
        assert after.prompt[: len(history)] == history
        assert len(after.prompt) > len(history)
        assert after.think_s > 0
