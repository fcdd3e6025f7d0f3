"""The trie of active chains: forks, prefixes, and values that stand at several places."""

from __future__ import annotations

import struct

import pytest

from select_service.core.ledger.active_blocks import ActiveBlocks
from select_service.core.ledger.chain_nodes import ChainNode
from select_service.core.ledger.decode_blocks import DecodeBlocks

SLOTS = 2


def pack(*hashes: int) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


class Trie:
    """A trie with its sums, checked after every step."""

    def __init__(self) -> None:
        self.sums = DecodeBlocks()
        self.sums.ensure(SLOTS)
        self.blocks = ActiveBlocks(self.sums)

    def acquire(self, *hashes: int, slot: int = 0) -> ChainNode:
        end = self.blocks.acquire(pack(*hashes), slot)
        self.blocks.check()
        assert self.blocks.chain(end) == pack(*hashes)
        return end

    def release(self, end: ChainNode, slot: int = 0) -> None:
        self.blocks.release(end, slot)
        self.blocks.check()

    def fade(self, end: ChainNode, fraction: float, slot: int = 0) -> None:
        self.blocks.fade(end, slot, fraction)
        self.blocks.check()

    def count(self, slot: int = 0) -> int:
        return self.sums.count(slot)


@pytest.fixture
def trie() -> Trie:
    return Trie()


def test_a_long_prompt_forks_and_heals(trie: Trie) -> None:
    prompt = range(10_000, 18_192)
    trie.acquire(*prompt)
    for cut in (1, 2, 4095, 4096, 8191):
        fork = trie.acquire(*prompt[:cut], 7, 8, slot=1)
        assert trie.blocks.shared_prefix(pack(*prompt)) == [(cut, 0b10), (8192, 0b01)]
        assert trie.count(1) == cut + 2
        trie.release(fork, 1)
        assert (trie.blocks.nodes, trie.blocks.blocks) == (1, 8192)


def test_a_prefix_that_ends_inside_a_run_counts(trie: Trie) -> None:
    trie.acquire(1, 2, 3, 4)
    assert trie.blocks.shared_prefix(pack(1, 2)) == [(2, 1)]
    assert trie.blocks.shared_prefix(pack(1, 2, 9)) == [(2, 1)]
    assert trie.blocks.shared_prefix(pack(1, 2, 3, 4, 5)) == [(4, 1)]
    assert trie.blocks.shared_prefix(pack(2, 3)) == []
    assert trie.blocks.shared_prefix(b"") == []


def test_a_fraction_dies_with_its_block_and_not_before(trie: Trie) -> None:
    first = trie.acquire(1, 2, 3, 4)
    trie.fade(first, 0.0)
    second = trie.acquire(1, 2)
    assert trie.count() == 0, "now shared, still faded"
    trie.release(first)
    assert trie.count() == 0
    trie.release(second)
    trie.acquire(1, 2)
    assert trie.count() == 2


def test_runs_of_different_weight_stay_apart_until_they_are_equal(trie: Trie) -> None:
    first, second = trie.acquire(1, 2, 3), trie.acquire(1, 2, 4)
    trie.fade(first, 0.0)
    trie.release(second)
    assert (trie.count(), trie.blocks.nodes) == (2, 2)
    trie.fade(first, 0.25)
    assert (trie.count(), trie.blocks.nodes) == (1, 1)


def test_a_repeat_is_found_wherever_it_was_first(trie: Trie) -> None:
    forward, backward = trie.acquire(*range(100)), trie.acquire(*reversed(range(100)))
    assert trie.count() == 100
    trie.fade(backward, 0.5)
    assert trie.count() == 100, "all shared"
    trie.release(forward)
    trie.fade(backward, 0.5)
    assert trie.count() == 50
    part = trie.acquire(*range(50), slot=1)
    assert trie.count(1) == 50
    trie.release(backward)
    assert trie.count() == 0
    trie.release(part, 1)
    assert trie.blocks.nodes == 0


def test_a_repeat_takes_its_fraction_along(trie: Trie) -> None:
    first = trie.acquire(1, 2, 3, 4)
    trie.fade(first, 0.25)
    second = trie.acquire(4, 5)
    assert trie.count() == 2
    trie.release(first)
    assert trie.count() == 1, "4 keeps 0.25 and 5 is whole: 1.25"
    trie.fade(second, 0.75)
    assert trie.count() == 2


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_a_run_with_repeats_is_divided_and_joined(trie: Trie, cut: int) -> None:
    run = (1, 2, 1, 3, 2, 4)
    whole = trie.acquire(*run)
    assert trie.count() == 4
    fork = trie.acquire(*run[:cut], slot=1)
    other = trie.acquire(*run[:cut], 4, slot=1)
    assert trie.count(1) == len({*run[:cut], 4})
    trie.fade(whole, 0.5)
    assert trie.count() == 2
    trie.release(fork, 1)
    trie.release(other, 1)
    assert (trie.count(), trie.count(1), trie.blocks.nodes) == (2, 0, 1)
    trie.release(whole)
    assert trie.blocks.nodes == 0


def test_memory_of_odd_clients_is_given_back_while_others_go_on(trie: Trie) -> None:
    trie.acquire(*range(100, 120))
    trie.release(trie.acquire(*range(119, 99, -1)))
    places_kept = [trie.blocks.indexed]
    for number in range(40):
        trie.release(trie.acquire(1000 + number, 2000 + number))
        places_kept.append(trie.blocks.indexed)
    assert places_kept[0], "the next odd client will want to know again"
    assert not places_kept[-1]
    trie.acquire(*range(119, 99, -1))
    assert trie.count() == 20


def test_a_value_within_one_prompt_needs_no_index(trie: Trie) -> None:
    trie.acquire(*range(100))
    end = trie.acquire(500, 500, 501)
    assert trie.count() == 102
    assert not trie.blocks.indexed
    trie.release(end)
    assert trie.count() == 100
