"""Both twins of the comparison of runs, against one block after the other."""

from __future__ import annotations

from itertools import takewhile
from types import ModuleType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indexer.core import plain_runs
from indexer.core.packing import pack_u64
from tests.indexer.kernels import twins

BLOCKS = st.lists(st.integers(0, 2**64 - 1), max_size=80)


@pytest.fixture(scope="module", params=twins("indexer._speed", plain_runs))
def twin(request: pytest.FixtureRequest) -> ModuleType:
    module = request.param
    assert isinstance(module, ModuleType)
    return module


@given(before=st.tuples(BLOCKS, BLOCKS), both=BLOCKS, after=st.tuples(BLOCKS, BLOCKS))
@example(before=([], []), both=[], after=([], []))
@example(before=([1], []), both=[0] * 700, after=([0], [2**63]))
def test_as_many_as_agree_one_by_one(
    twin: ModuleType,
    before: tuple[list[int], list[int]],
    both: list[int],
    after: tuple[list[int], list[int]],
) -> None:
    one, other = both + after[0], both + after[1]
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    edge, hashes = pack_u64(before[0] + one), pack_u64(before[1] + other)
    found = twin.common_blocks(edge, 8 * len(before[0]), hashes, 8 * len(before[1]))
    assert found == sum(1 for _ in alike)


@given(both=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=600), data=st.data())
def test_one_bit_anywhere(twin: ModuleType, both: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(both) - 1))
    other = both.copy()
    other[at] ^= 1 << data.draw(st.integers(0, 63))
    assert twin.common_blocks(pack_u64(both), 0, pack_u64(other), 0) == at
