"""Both twins of the hashing kernel against the xxhash package, over every kind of length."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from indexer.core import plain_hashing
from tests.indexer.kernels import twins

U64 = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module", params=twins("indexer._speed", plain_hashing))
def twin(request: pytest.FixtureRequest) -> ModuleType:
    module = request.param
    assert isinstance(module, ModuleType)
    return module


def _expected(data: bytes, stride: int, width: int, seed: int) -> bytes:
    starts = range(0, len(data) - width + 1, stride)
    return b"".join(
        xxh3_64_intdigest(data[at : at + width], seed).to_bytes(8, "little") for at in starts
    )


@pytest.mark.parametrize("seed", [0, 1337, 0x9E3779B97F4A7C15, 2**64 - 1])
def test_every_length_up_to_two_blocks_of_the_long_form(twin: ModuleType, seed: int) -> None:
    data = random.Random(seed).randbytes(2300)
    for length in range(4, 2300):
        expected = _expected(data[:length], length, length, seed)
        assert twin.window_hashes(data[:length], length, length, seed) == expected, length


@given(data=st.binary(min_size=4, max_size=1200), seed=U64)
@example(data=b"\xff" * 1025, seed=2**63)
def test_any_bytes_under_any_seed(twin: ModuleType, data: bytes, seed: int) -> None:
    size = len(data)
    assert twin.window_hashes(data, size, size, seed) == _expected(data, size, size, seed)


@given(
    data=st.binary(max_size=1200),
    tokens=st.integers(1, 80),
    is_eagle=st.booleans(),
    seed=U64,
)
def test_windows(twin: ModuleType, data: bytes, tokens: int, is_eagle: bool, seed: int) -> None:
    stride, width = 4 * tokens, 4 * (tokens + is_eagle)
    expected = _expected(data, stride, width, seed)
    assert twin.window_hashes(data, stride, width, seed) == expected


@pytest.mark.parametrize(("stride", "width"), [(4, 3), (3, 4), (4, 0), (0, 4), (-4, 4), (1, 1)])
def test_windows_have_whole_tokens(twin: ModuleType, stride: int, width: int) -> None:
    with pytest.raises(ValueError, match="tokens"):
        twin.window_hashes(bytes(16), stride, width, 1337)


@given(hashes=st.lists(U64, max_size=20))
def test_chains(twin: ModuleType, hashes: list[int]) -> None:
    local = b"".join(value.to_bytes(8, "little") for value in hashes)
    chain = local[:8]
    for at in range(8, len(local), 8):
        link = xxh3_64_intdigest(chain[-8:] + local[at : at + 8], 1337)
        chain += link.to_bytes(8, "little")
    assert twin.sequence_hashes(local) == chain
