"""Numbers are packed the same whatever holds them: lists, tuples, arrays of C or numpy."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.packing import pack_tokens, pack_u64

TOKENS = [0, 1, 128_000, 2**32 - 1]


@pytest.mark.parametrize(
    "made",
    [
        *(tuple, lambda one: array("I", one), lambda one: memoryview(array("I", one))),
        *(lambda one: np.array(one, dtype=np.uint32), lambda one: np.array(one, dtype=np.int64)),
        *(lambda one: np.array(one, dtype=">u4"), lambda one: np.repeat(one, 2)[::2]),
        lambda one: np.array([one, one], dtype=np.uint32).T[:, 0],
        lambda one: [np.uint32(value) for value in one],
    ],
)
def test_tokens(made: Any) -> None:
    expected = b"".join(one.to_bytes(4, "little") for one in TOKENS)
    assert pack_tokens(made(TOKENS)) == expected
    assert pack_tokens(made([])) == b""


@pytest.mark.parametrize(
    "wrong",
    [
        *(np.array([1, -1]), np.array([1.0]), np.array([2**32]), array("i", [-1]), array("d", [1])),
        *(np.array([[1, 2]], dtype=np.uint32), np.array(["1"]), "12"),
    ],
    ids=repr,
)
def test_no_tokens(wrong: Any) -> None:
    with pytest.raises(ValueError, match="token ids must be unsigned 32-bit integers"):
        pack_tokens(wrong)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_hashes(values: list[int]) -> None:
    expected = b"".join((one % 2**64).to_bytes(8, "little") for one in values)
    signed = np.array(values, dtype=np.int64)
    unsigned = [one % 2**64 for one in values]
    for one in (values, tuple(values), array("q", values), signed, signed.view(np.uint64)):
        assert pack_u64(one) == expected  # type: ignore[arg-type]
    for other in (unsigned, array("Q", unsigned), list(np.array(unsigned, dtype=np.uint64))):
        assert pack_u64(other) == expected


@pytest.mark.parametrize("wrong", [np.array([1.0]), array("d", [1.0]), [2**64], "12"], ids=repr)
def test_no_hashes(wrong: Any) -> None:
    with pytest.raises(ValueError, match="hash"):
        pack_u64(wrong)
