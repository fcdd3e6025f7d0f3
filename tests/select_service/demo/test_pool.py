"""The pool against what a consumer of its events would believe."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from select_service.demo.pool import (
    BlockPool,
    Cleared,
    Removed,
    RequestOpen,
    RequestTooLarge,
    Stored,
)
from tests.effort import examples

BLOCK = 4


def prompt(*blocks: int) -> list[int]:
    """Each number becomes a block of that token."""
    return [block for block in blocks for _ in range(BLOCK)]


def run(pool: BlockPool, request_id: str, tokens: list[int]) -> int:
    hits = pool.open(request_id, tokens, 0)
    assert hits is not None
    pool.compute(request_id, len(tokens))
    pool.close(request_id)
    return hits


def test_a_second_prompt_reuses_all_but_the_block_of_its_last_token() -> None:
    pool = BlockPool(16, BLOCK)
    assert run(pool, "a", prompt(1, 2, 3)) == 0
    assert run(pool, "b", prompt(1, 2, 3)) == 2
    assert run(pool, "c", [*prompt(1, 2, 3), 9]) == 3
    assert pool.match(prompt(1, 2, 3, 4)) == 3
    assert pool.match(prompt(2, 3)) == 0


def test_events_name_parent_and_tokens() -> None:
    pool = BlockPool(16, BLOCK)
    run(pool, "a", prompt(1, 2))
    (first,) = pool.take_events()
    assert isinstance(first, Stored)
    assert (first.parent, list(first.token_ids)) == (None, prompt(1, 2))
    run(pool, "b", prompt(1, 2, 3))
    (second,) = pool.take_events()
    assert isinstance(second, Stored)
    assert (second.parent, list(second.token_ids)) == (first.hashes[1], prompt(3))


def test_a_block_computed_twice_at_once_is_cached_twice_and_removed_twice() -> None:
    pool = BlockPool(4, BLOCK)
    for name in ("a", "b"):
        assert pool.open(name, prompt(1, 2), 0) == 0
    for name in ("a", "b"):
        pool.compute(name, 2 * BLOCK)
        pool.close(name)
    stored = Counter(h for e in pool.take_events() if isinstance(e, Stored) for h in e.hashes)
    assert set(stored.values()) == {2}
    run(pool, "c", prompt(5, 6, 7, 8))
    removed = Counter(h for e in pool.take_events() if isinstance(e, Removed) for h in e.hashes)
    assert removed == stored


def test_the_tail_of_the_least_recently_used_request_goes_first() -> None:
    pool = BlockPool(4, BLOCK)
    run(pool, "a", prompt(1, 2))
    run(pool, "b", prompt(3, 4))
    run(pool, "c", prompt(5))
    assert pool.match(prompt(1, 2)) == 1
    assert pool.match(prompt(3, 4)) == 2
    assert pool.evictions == 1


def test_output_fills_blocks_and_extends_the_chain() -> None:
    pool = BlockPool(8, BLOCK)
    assert pool.open("a", [1, 1, 1], 6) == 0
    pool.compute("a", 3)
    filled = [pool.append("a", token) for token in (1, 2, 2, 2, 2, 3)]
    pool.close("a")
    assert filled == [True, False, False, False, True, False]
    assert pool.match([*prompt(1, 2), 3]) == 2
    assert run(pool, "b", prompt(1, 2, 3)) == 2


def test_a_request_waits_for_room_that_is_promised_to_others() -> None:
    pool = BlockPool(4, BLOCK)
    assert pool.open("a", prompt(1), 2 * BLOCK) == 0
    assert pool.open("b", prompt(2), BLOCK) is None
    assert pool.open("b", prompt(2), 0) == 0
    pool.close("a")
    assert pool.open("c", prompt(3), 2 * BLOCK) == 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0, BLOCK)
    pool = BlockPool(2, BLOCK)
    with pytest.raises(RequestTooLarge):
        pool.open("a", prompt(1, 2), 1)
    pool.open("a", prompt(1), 0)
    with pytest.raises(RequestOpen):
        pool.open("a", prompt(1), 0)


def test_clear_forgets_everything_but_not_under_a_running_request() -> None:
    pool = BlockPool(4, BLOCK)
    run(pool, "a", prompt(1, 2))
    pool.open("b", prompt(3), 0)
    assert not pool.clear()
    pool.close("b")
    pool.take_events()
    assert pool.clear()
    assert pool.take_events() == [Cleared()]
    assert (pool.match(prompt(1)), pool.blocks_held) == (0, 0)
    pool.check()


def test_another_start_has_other_hashes() -> None:
    def hashes(seed: int) -> tuple[int, ...]:
        pool = BlockPool(4, BLOCK, hash_seed=seed)
        run(pool, "a", prompt(1))
        (event,) = pool.take_events()
        assert isinstance(event, Stored)
        return event.hashes

    assert hashes(1) == hashes(1) != hashes(2)


class PoolMachine(RuleBasedStateMachine):
    """A consumer that only counts stores and removals always knows what `match` knows."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 2)
        self.believed: Counter[int] = Counter()
        self.chains: dict[tuple[int, ...], int] = {(): 0}  # prefix → its last hash
        self.prefix_of: dict[int | None, tuple[int, ...]] = {None: ()}
        self.unfinished: dict[str, int] = {}
        self.names = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), output=st.integers(0, 6))
    def open(self, tokens: list[int], output: int) -> None:
        self.names += 1
        name = str(self.names)
        if self.pool.open(name, tokens, output) is not None:
            self.pool.compute(name, len(tokens))
            self.unfinished[name] = output

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data(), token=st.integers(0, 1))
    def advance(self, data: st.DataObject, token: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.unfinished)))
        if self.unfinished[name]:
            self.unfinished[name] -= 1
            self.pool.append(name, token)
        else:
            del self.unfinished[name]
            self.pool.close(name)

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    @invariant()
    def the_consumer_is_right(self) -> None:
        self.pool.check()
        for event in self.pool.take_events():
            if isinstance(event, Stored):
                prefix = self.prefix_of[event.parent]
                for position, value in enumerate(event.hashes):
                    prefix += event.token_ids[2 * position : 2 * position + 2]
                    self.prefix_of[value] = prefix
                    self.chains[prefix] = value
                    self.believed[value] += 1
            elif isinstance(event, Removed):
                self.believed.subtract(event.hashes)
            else:
                self.believed.clear()
        assert min(self.believed.values(), default=0) >= 0
        assert self.pool.blocks_held == self.believed.total()
        for prefix in self.chains:
            parts = [prefix[: end + 2] for end in range(0, len(prefix), 2)]
            held = [self.believed[self.chains[part]] > 0 for part in parts]
            leading = held.index(False) if False in held else len(held)
            assert self.pool.match(prefix) == leading


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=examples(30), stateful_step_count=30, deadline=None
)
