"""Removals in runs: every order of a list gives the same index as one block at a time."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from indexer.core.index import KvIndex
from indexer.core.packing import pack_u64
from indexer.types import Tier, WorkerRank

RANK = WorkerRank(1, 0)
OTHER = WorkerRank(2, 0)
BLOCKS = 200  # more than one stretch


def local(count: int, first: int = 0) -> bytes:
    return pack_u64(range(first + 1, first + 1 + count))


def filled(*, tiers: tuple[Tier, ...] = (Tier.DEVICE,), is_shared: bool = False) -> KvIndex:
    index = KvIndex(16)
    index.attach(RANK)
    index.attach(OTHER)
    names = range(1000, 1000 + BLOCKS)
    for tier in tiers:
        index.store(RANK, tier, None, names, local(BLOCKS))
    if is_shared:
        index.store(OTHER, Tier.DEVICE, None, names, local(BLOCKS))
    return index


def matched(index: KvIndex, rank: WorkerRank = RANK) -> tuple[int, int, int]:
    slot = index.slot_of(rank)
    assert slot is not None
    return index.find_matches(local(BLOCKS)).rows().get(slot, (0, 0, 0))


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("is_backwards", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize(("first", "last"), [(0, 200), (0, 50), (50, 200), (70, 180), (3, 4)])
def test_a_stretch_goes_at_once(
    first: int, last: int, *, is_shared: bool, is_backwards: bool, is_packed: bool
) -> None:
    index = filled(is_shared=is_shared)
    names: Sequence[int] = list(range(1000 + first, 1000 + last))[:: -1 if is_backwards else 1]
    names = array("Q", names) if is_packed else names
    assert index.remove(RANK, Tier.DEVICE, names) == last - first
    index.check()
    assert matched(index) == (first, 0, 0)
    assert matched(index, OTHER) == (BLOCKS * is_shared, 0, 0)
    assert index.remove(RANK, Tier.DEVICE, names) == 0
    index.store(
        RANK,
        Tier.DEVICE,
        999 + first if first else None,
        sorted(names),
        local(BLOCKS)[first * 8 : last * 8],
    )
    index.check()
    assert matched(index) == (BLOCKS, 0, 0)


def test_an_old_name_beside_held_ones_is_not_mistaken_for_them() -> None:
    index = filled()
    index.remove(RANK, Tier.DEVICE, [1100])
    # the name of the hole lives on, behind the end of the same node
    index.store(RANK, Tier.DEVICE, 1199, [1100], local(1, first=BLOCKS))
    assert index.remove(RANK, Tier.DEVICE, [1099, 1100, 1101]) == 3
    index.check()
    assert matched(index) == (99, 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_ends_alike(seed: int) -> None:
    rng = random.Random(seed)
    tiers = (Tier.DEVICE, Tier.HOST_PINNED)[: 1 + seed % 2]
    listed, single = filled(tiers=tiers), filled(tiers=tiers)
    for index in (listed, single):
        index.store(RANK, Tier.DEVICE, 1120, [5000, 5001], local(2, first=7000))
        index.store(RANK, Tier.DEVICE, 1010, [1011], local(1, first=10), group=seed % 3)
    names = [*range(1000, 1000 + BLOCKS), 5000, 5001, 77]
    while names:
        size = rng.randrange(1, 70)
        some = names[:size] if rng.random() < 0.5 else names[-size:][::-1]
        if rng.random() < 0.3:
            rng.shuffle(some)
        names = [name for name in names if name not in some]
        tier = rng.choice(tiers)
        told = array("Q", some) if rng.random() < 0.5 else some
        assert listed.remove(RANK, tier, told) == sum(
            single.remove(RANK, tier, [name]) for name in some
        )
        listed.check()
        assert matched(listed) == matched(single)
        assert listed.stats.holdings == single.stats.holdings
