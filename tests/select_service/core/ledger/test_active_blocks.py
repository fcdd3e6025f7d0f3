"""The active blocks, compiled and plain, against lists of chains and dicts of values."""

from __future__ import annotations

import random
import struct
from collections import Counter
from math import fsum
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.ledger import plain_active_blocks
from select_service.core.ledger.active_blocks import ActiveBlocks, ChainNode, check
from select_service.core.ledger.exact_sums import rounded
from tests.indexer.core.indices import pack
from tests.indexer.kernels import twins

LANES = 3
EITHER = twins("select_service.core._ledger", plain_active_blocks)

values = st.integers(0, 5) | st.sampled_from([2**64 - 1, 2**63, 2**32])
chains = st.lists(values, max_size=8)
weights = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 1.0])
steps = st.lists(
    st.tuples(st.just("acquire"), st.integers(0, LANES - 1), chains)
    | st.tuples(st.just("release"), st.integers(0, 99), st.none())
    | st.tuples(st.just("fade"), st.integers(0, 99), weights)
    | st.tuples(st.just("add"), st.integers(0, LANES - 1), weights),
    max_size=40,
)


class Naive:
    """Every chain by itself."""

    def __init__(self) -> None:
        self.live: list[tuple[int, tuple[int, ...]]] = []
        self.weights: dict[tuple[int, int], float] = {}
        self.outputs: list[Counter[float]] = [Counter() for _ in range(LANES)]

    def release(self, at: int) -> None:
        generation, chain = self.live.pop(at)
        for value in chain:
            if not any(generation == other and value in of for other, of in self.live):
                self.weights.pop((generation, value), None)

    def fade(self, at: int, weight: float) -> None:
        generation, chain = self.live[at]
        for value in chain:
            if sum(generation == other and value in of for other, of in self.live) == 1:
                self.weights[generation, value] = weight

    def count(self, generation: int) -> int:
        held = {value for other, chain in self.live if generation == other for value in chain}
        total = [self.weights.get((generation, value), 1.0) for value in held]
        return rounded(fsum([*total, *self.outputs[generation].elements()]))

    def shared(self, chain: tuple[int, ...]) -> dict[int, int]:
        longest: dict[int, int] = {}
        for generation, other in self.live:
            common = next(
                (at for at, pair in enumerate(zip(chain, other, strict=False)) if len({*pair}) > 1),
                min(len(chain), len(other)),
            )
            if common:
                longest[generation] = max(common, longest.get(generation, 0))
        return longest

    def positions(self) -> int:
        return len(
            {
                (generation, chain[:end])
                for generation, chain in self.live
                for end in range(1, len(chain) + 1)
            }
        )


def with_lanes(form: ModuleType, generations: int) -> ActiveBlocks:
    """Return active blocks in one form."""
    blocks: ActiveBlocks = form.ActiveBlocks()
    blocks.counts.ensure(generations)
    return blocks


class Both:
    """One form beside the naive one, compared after every step."""

    def __init__(self, form: ModuleType) -> None:
        self.real = with_lanes(form, LANES)
        self.naive = Naive()
        self.handles: list[ChainNode] = []

    def acquire(self, *chain: int, generation: int = 0) -> int:
        self.handles.append(self.real.acquire(pack(*chain), generation))
        self.naive.live.append((generation, chain))
        self.compare()
        return len(self.handles) - 1

    def release(self, at: int) -> None:
        self.real.release(self.handles.pop(at), self.naive.live[at][0])
        self.naive.release(at)
        self.compare()

    def fade(self, at: int, weight: float) -> None:
        self.real.fade(self.handles[at], self.naive.live[at][0], weight)
        self.naive.fade(at, weight)
        self.compare()

    def add(self, generation: int, weight: float) -> None:
        self.real.counts.add(generation, 2, weight)
        self.naive.outputs[generation][weight] += 2
        self.compare()

    def shared(self, *chain: int) -> dict[int, int]:
        groups = self.real.shared_prefix(pack(*chain))
        assert [blocks for blocks, _ in groups] == sorted({blocks for blocks, _ in groups})
        found: dict[int, int] = {}
        for blocks, generations in groups:
            held = [generation for generation in range(LANES) if generations >> generation & 1]
            assert not found.keys() & set(held)
            found.update(dict.fromkeys(held, blocks))
        return found

    def compare(self) -> None:
        for generation in range(LANES):
            assert self.real.counts.count(generation) == self.naive.count(generation)
        for handle, (generation, chain) in zip(self.handles, self.naive.live, strict=True):
            assert self.real.chain(handle) == pack(*chain)
            expected = {one: self.naive.weights.get((generation, one), 1.0) for one in chain}
            found = self.real.counts.weights(generation, self.real.chain(handle))
            found = {struct.unpack("=Q", struct.pack("=Q", one))[0]: found[one] for one in found}
            assert found == {one: expected[one] for one in expected if expected[one] != 1.0}
            assert (pack(*chain[:1]) in self.real.root.children) is bool(chain)
        assert self.real.blocks == self.naive.positions()
        check(self.real)


@pytest.fixture(params=EITHER)
def both(request: pytest.FixtureRequest) -> Both:
    return Both(request.param)


@pytest.mark.parametrize("form", EITHER)
@given(history=steps, asked=chains)
def test_any_history(
    form: ModuleType, history: list[tuple[str, int, Any]], asked: list[int]
) -> None:
    both = Both(form)
    for verb, number, what in history:
        if verb == "acquire":
            both.acquire(*what, generation=number)
        elif verb == "add":
            both.add(number, what)
        elif both.handles:
            at = number % len(both.handles)
            if verb == "fade":
                both.fade(at, what)
            else:
                both.release(at)
        assert both.shared(*asked) == both.naive.shared(tuple(asked))
    while both.handles:
        both.release(0)
    assert (both.real.nodes, both.real.blocks) == (0, 0)


@pytest.mark.parametrize("form", EITHER)
def test_tables_grow_and_shrink_under_way(form: ModuleType) -> None:
    """Some thousand values in one lane come and go, with every chain a prefix of others."""
    rng, real, live = random.Random(5), with_lanes(form, 1), list[tuple[ChainNode, list[int]]]()
    places: Counter[int] = Counter()
    for target in (40, 400, 4, 200, 0, 30, 0):
        while len(live) != target:
            if len(live) < target:
                start = rng.choice(live)[1] if live and rng.random() < 0.3 else []
                chain = start[: rng.randrange(40)] + [rng.randrange(9000) for _ in range(30)]
                live.append((real.acquire(pack(*chain), 0), chain))
                places.update(set(chain))
            else:
                handle, chain = live.pop(rng.randrange(len(live)))
                real.release(handle, 0)
                places.subtract(set(chain))
            if len(live) % 8 == 0:
                assert real.counts.count(0) == sum(count > 0 for count in places.values())
                assert all(real.chain(handle) == pack(*chain) for handle, chain in live)
    assert (real.nodes, real.blocks, real.counts.count(0)) == (0, 0, 0)


@pytest.mark.parametrize("form", EITHER)
def test_what_is_not_there_is_refused(form: ModuleType) -> None:
    counts: Any = form.BlockCounts()
    counts.ensure(1)
    counts.enter(0, pack(1, 2))
    with pytest.raises(KeyError):
        counts.leave(0, pack(3))
    for generation in (1, 2):
        with pytest.raises(IndexError):
            counts.enter(generation, pack(1))
        with pytest.raises(IndexError):
            counts.count(generation)


def test_a_long_prompt_forks_and_heals(both: Both) -> None:
    prompt = range(10_000, 10_512)
    both.acquire(*prompt)
    for cut in (1, 2, 255, 256, 511):
        fork = both.acquire(*prompt[:cut], 7, 8, generation=1)
        assert both.shared(*prompt) == {1: cut, 0: 512}
        both.release(fork)
        assert (both.real.nodes, both.real.blocks) == (1, 512)


def test_a_node_that_many_lanes_use(both: Both) -> None:
    """More than its room for users grows by, in no order, and through a split."""
    generations = [2, 0, 1]
    for generation in generations:
        both.acquire(1, 2, 3, 4, generation=generation)
    both.acquire(1, 2, 9, generation=1)
    assert both.shared(1, 2, 3) == {0: 3, 1: 3, 2: 3}
    for _ in generations:
        both.release(0)
    assert both.shared(1, 2, 3) == {1: 2}


@pytest.mark.parametrize("form", EITHER)
@given(mask=st.integers(0, 2**200))
def test_positions_of_a_mask(form: ModuleType, mask: int) -> None:
    found = form.positions_of(mask)
    assert list(struct.unpack(f"<{len(found) // 8}q", found)) == [
        at for at in range(mask.bit_length()) if mask >> at & 1
    ]


@pytest.mark.parametrize("form", EITHER)
def test_a_lane_that_is_not_there_gets_no_chain(form: ModuleType) -> None:
    with pytest.raises(IndexError):
        with_lanes(form, 1).acquire(pack(1), 1)
    blocks = with_lanes(form, 2)
    handle = blocks.acquire(pack(1), 0)
    with pytest.raises(KeyError):
        blocks.release(handle, 1)
