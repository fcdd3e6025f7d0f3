"""Block and sequence hashes against vectors computed by two independent implementations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core import hashing, plain_hashing
from indexer.core.hashing import block_hashes, namespace_seed
from indexer.core.packing import pack_tokens, pack_u64, unpack_i64, unpack_u64
from indexer.types import U64_MASK, Namespace
from tests.indexer.golden import golden
from tests.indexer.kernels import twins

EVENT_VECTORS = golden("events/block_hashes.json")["vectors"]
CONTRACT_VECTORS = golden("contract/hash_vectors.json")


@pytest.fixture(scope="module", autouse=True, params=twins("indexer._speed", plain_hashing))
def twin(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("window_hashes", "sequence_hashes"):
            patch.setattr(hashing, name, getattr(request.param, name))
        yield


def _mm(infos: list[dict[str, Any] | None] | None) -> list[list[int]] | None:
    if infos is None:
        return None
    return [[m["mm_hash"] for m in info["mm_objects"]] if info else [] for info in infos]


def _check(vector: dict[str, Any], kwargs: dict[str, Any], expected: list[int]) -> None:
    salt = kwargs.get("cache_salt") or kwargs.get("cache_namespace") or ""
    packed = block_hashes(
        vector["tokens"],
        vector["block_size"],
        namespace=Namespace(kwargs.get("lora_name") or "", salt),
        is_eagle=bool(kwargs.get("is_eagle")),
        mm_hashes=_mm(kwargs.get("mm") or kwargs.get("block_mm_infos")),
    )
    assert unpack_u64(packed) == expected
    assert unpack_u64(hashing.sequence_hashes(packed)) == vector["sequence_hashes"]


@pytest.mark.parametrize("vector", EVENT_VECTORS, ids=lambda v: v["name"])
def test_event_vectors(vector: dict[str, Any]) -> None:
    _check(vector, vector, vector["local_block_hashes"])


@pytest.mark.parametrize("vector", CONTRACT_VECTORS, ids=range(len(CONTRACT_VECTORS)))
def test_contract_vectors(vector: dict[str, Any]) -> None:
    _check(vector, vector["kwargs"], vector["block_hashes"])


def test_names_may_be_empty_and_need_not_be_encodable() -> None:
    assert namespace_seed(Namespace("", "")) == 1337
    assert namespace_seed(Namespace("\ud800", "")) != 1337  # a lone surrogate, as JSON may carry


@pytest.mark.parametrize("token", [-1, 1 << 32, 1.0, "1", None])
def test_what_is_no_token_is_refused(token: Any) -> None:
    with pytest.raises(ValueError, match="unsigned 32-bit"):
        block_hashes([token], 1)


def test_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        block_hashes([1], 0)
    assert block_hashes([1, 2], 1 << 62) == b""
    assert block_hashes([1, 2], 1 << 62, is_eagle=True) == b""


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(1, 9),
    st.booleans(),
    st.lists(st.lists(st.integers(0, U64_MASK), max_size=2), max_size=6),
)
def test_tokens_may_come_packed(
    tokens: list[int], block_size: int, is_eagle: bool, media: list[list[int]]
) -> None:
    packed = pack_tokens(tokens)
    assert packed == b"".join(token.to_bytes(4, "little") for token in tokens)
    listed = block_hashes(tokens, block_size, is_eagle=is_eagle, mm_hashes=media)
    assert block_hashes(packed, block_size, is_eagle=is_eagle, mm_hashes=media) == listed


@given(st.lists(st.integers(-(1 << 63), U64_MASK)))
def test_hashes_pack_modulo_two_to_the_64(values: list[int]) -> None:
    packed = pack_u64(values)
    assert unpack_u64(packed) == [v & U64_MASK for v in values]
    assert [v & U64_MASK for v in unpack_i64(packed)] == unpack_u64(packed)


@pytest.mark.parametrize("value", [-(1 << 63) - 1, 1 << 64, 1.0, None])
def test_what_does_not_fit_64_bits_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        pack_u64([1, value])


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(1, 9),
    st.booleans(),
    st.lists(st.lists(st.integers(0, U64_MASK), max_size=2), max_size=6),
)
def test_a_prefix_has_the_prefix_of_the_hashes(
    tokens: list[int], block_size: int, is_eagle: bool, media: list[list[int]]
) -> None:
    whole = block_hashes(tokens, block_size, is_eagle=is_eagle, mm_hashes=media)
    blocks = (len(tokens) - is_eagle) // block_size if len(tokens) > is_eagle else 0
    assert len(whole) == 8 * blocks
    cut = len(tokens) // 2
    part = block_hashes(tokens[:cut], block_size, is_eagle=is_eagle, mm_hashes=media)
    assert whole.startswith(part)
    assert hashing.sequence_hashes(whole).startswith(hashing.sequence_hashes(part))
