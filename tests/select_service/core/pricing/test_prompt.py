"""One normal form of a prompt, whatever the request and whoever made it."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.hashing import block_hashes, sequence_hashes
from indexer.core.packing import pack_tokens, pack_u64
from select_service.core.pricing.prompt import Prompt
from select_service.core.routing.read import RequestReader, fingerprint_of, packed, read_booking
from select_service.edge.codec.json_codec import RequestDecoder
from select_service.errors import InvalidField, InvalidRequest
from select_service.settings import FieldValidation
from select_service.types import (
    BlockMmInfo,
    CoreLimits,
    MmObject,
    MmRoutingInfo,
    ReservationRequest,
    RouterConfig,
    SelectAndReserveRequest,
    SelectRequest,
)

TOKENS = list(range(70))
HASHES = [1, 2**64 - 1, 2**63, 5]
BOOKING: dict[str, Any] = {"reservation_id": "r", "worker_id": 1}


def parts(prompt: Prompt) -> tuple[bytes, bytes, bytes, int, int]:
    return (
        *(prompt.block_hashes, prompt.first_hash, prompt.sequence_hashes),
        *(prompt.blocks, prompt.isl_tokens),
    )


def reading(request: SelectRequest) -> Prompt:
    partition = Mock(index=Mock(block_size=16, is_eagle=False))
    reader = RequestReader(RouterConfig(), {}, Mock(), Mock(), CoreLimits(), Random(0))
    return reader.selection(request, partition)[1]


def read(**fields: Any) -> Prompt:
    return reading(SelectRequest(**fields))


# -- the chain -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=80))
def test_the_chain_of_tokens_is_made_on_demand(tokens: list[int]) -> None:
    local = block_hashes(tokens, 16)
    prompt = read(token_ids=tokens)
    assert prompt.first_hash == sequence_hashes(local)[:8]
    assert prompt.blocks == len(tokens) // 16
    assert prompt.sequence_hashes == sequence_hashes(local)
    assert prompt.sequence_hashes is prompt.sequence_hashes


def test_a_booking_has_its_chain_and_nothing_to_match() -> None:
    request = ReservationRequest(**BOOKING, sequence_hashes=HASHES, isl_tokens=64)
    prompt = read_booking(request, block_size=16, is_eagle=False)
    chain = pack_u64(HASHES)
    assert parts(prompt) == (b"", chain[:8], chain, 4, 64)


# -- both forms ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": TOKENS},
        {"token_ids": TOKENS, "block_hashes": [7], "sequence_hashes": [8, 9]},
        {"block_hashes": HASHES, "sequence_hashes": HASHES[::-1], "isl_tokens": 64},
        {"block_hashes": [], "sequence_hashes": [], "isl_tokens": 5},
        {
            "token_ids": [1],
            "mm_routing_info": MmRoutingInfo(
                TOKENS, [BlockMmInfo([MmObject(mm_hash=9, offsets=[(0, 1)])])]
            ),
        },
    ],
)
def test_lists_and_packed_numbers_are_the_same_prompt(fields: dict[str, Any]) -> None:
    listed = SelectRequest(**fields)
    assert parts(read(**fields)) == parts(reading(packed(listed)))
    booking = ReservationRequest(**BOOKING, **fields)
    one, other = (
        read_booking(form, block_size=16, is_eagle=True) for form in (booking, packed(booking))
    )
    assert parts(one) == parts(other)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": []}, "isl_tokens"),
        ({"block_hashes": [1]}, "sequence_hashes"),
        ({"block_hashes": [1], "sequence_hashes": [1]}, "isl_tokens"),
        ({"block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 0}, "isl_tokens"),
        ({"block_hashes": [1, 2], "sequence_hashes": [1], "isl_tokens": 1}, "block_hashes"),
    ],
)
def test_the_complaints_are_the_same(fields: dict[str, Any], field: str) -> None:
    request = SelectRequest(**fields)
    said = []
    for form in (request, packed(request)):
        with pytest.raises(InvalidRequest) as refused:
            reading(form)
        assert refused.value.field == field
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_hashes_are_counted_before_they_are_read() -> None:
    """The order of complaint is the same in every form, and too many cost nothing."""
    with pytest.raises(InvalidRequest, match="must match") as refused:
        read(block_hashes=[], sequence_hashes=[1 << 64], isl_tokens=1)
    assert refused.value.field == "block_hashes"


@pytest.mark.parametrize("name", ["block_hashes", "sequence_hashes"])
def test_a_caller_app_client_may_be_wrong_too(name: str) -> None:
    right = {"block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 16}
    for fields in (right | {name: [2**64]}, {"token_ids": TOKENS, name: [2**64]}):
        with pytest.raises(InvalidField) as refused:
            read(**fields)
        assert refused.value.field == name


@pytest.mark.parametrize("name", ["token_ids", "block_hashes", "sequence_hashes"])
@pytest.mark.parametrize("tokens", [{}, {"token_ids": bytes(128)}])
def test_packed_numbers_come_whole(name: str, tokens: dict[str, bytes]) -> None:
    fields: dict[str, Any] = {"block_hashes": bytes(16), "sequence_hashes": bytes(16)}
    fields |= {"isl_tokens": 32, **tokens, name: bytes(17)}
    with pytest.raises(InvalidField) as refused:
        read(**fields)
    assert refused.value.field == name
    with pytest.raises(InvalidField) as refused:
        read_booking(ReservationRequest(**BOOKING, **fields), block_size=16, is_eagle=False)
    assert refused.value.field == name


# -- fingerprints --------------------------------------------------------------------------------


def test_a_fingerprint_does_not_depend_on_the_form() -> None:
    fields: dict[str, Any] = {
        "reservation_id": "r",
        "block_hashes": HASHES,
        "sequence_hashes": HASHES,
        "token_ids": TOKENS,
        "isl_tokens": 64,
    }
    listed = SelectAndReserveRequest(**fields)
    decoded = (
        RequestDecoder(SelectAndReserveRequest, FieldValidation.WARN)
        .decode(msgspec.json.encode(fields))
        .request
    )
    assert decoded.token_ids == pack_tokens(TOKENS)
    assert fingerprint_of(listed, b"") == fingerprint_of(decoded, b"")
    assert listed.block_hashes is HASHES, "the caller's request is left alone"


def test_fingerprints_of_different_bodies_differ() -> None:
    bodies: list[dict[str, Any]] = [
        {},
        *({name: []} for name in ("token_ids", "block_hashes", "sequence_hashes")),
        *({name: [1]} for name in ("token_ids", "block_hashes", "sequence_hashes")),
        {"token_ids": [1, 0]},
        {"token_ids": [1, 2]},
        {"block_hashes": [1 + (2 << 32)]},
        {"block_hashes": [1], "sequence_hashes": [1]},
        {"block_hashes": [1], "sequence_hashes": []},
        {"tenant_id": "default"},
        {"tenant_id": ""},
        {"mm_routing_info": MmRoutingInfo([1])},
    ]
    decoders = [
        RequestDecoder(kind, FieldValidation.WARN)
        for kind in (SelectAndReserveRequest, ReservationRequest)
    ]
    found = {
        fingerprint_of(decoder.decode(msgspec.json.encode(BOOKING | body)).request, unknown)
        for decoder in decoders
        for body in bodies
        for unknown in (b"", b'{"a":1}')
    }
    assert len(found) == len(bodies) * 4


@pytest.mark.parametrize("kind", [np.uint32, np.int64])
def test_arrays_of_numpy_are_what_lists_are(kind: Any) -> None:
    tokens: Any = np.array(TOKENS, dtype=kind)
    assert parts(read(token_ids=tokens)) == parts(read(token_ids=TOKENS))
    media = MmRoutingInfo(routing_token_ids=tokens)
    assert parts(read(mm_routing_info=media)) == parts(read(token_ids=TOKENS))
    hashes = np.array(HASHES, dtype=np.uint64)
    fields = {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": 64}
    plain = {"block_hashes": HASHES, "sequence_hashes": HASHES, "isl_tokens": 64}
    assert parts(read(**fields)) == parts(read(**plain))
    assert parts(read(token_ids=tokens, **fields)) == parts(read(token_ids=TOKENS))
    with pytest.raises(InvalidRequest, match="greater than 0"):
        read(token_ids=tokens[:0])


@pytest.mark.parametrize("kind", [np.uint32, np.int64])
def test_a_body_with_arrays_of_numpy_is_the_same_as_with_lists(kind: Any) -> None:
    """A repeated booking is known by it, whoever says it how."""

    def fingerprint(tokens: Any) -> list[bytes]:
        prompts: list[dict[str, Any]] = [
            {"token_ids": tokens},
            {"mm_routing_info": MmRoutingInfo(tokens)},
            {"block_hashes": tokens, "sequence_hashes": tokens},
        ]
        return [
            fingerprint_of(SelectAndReserveRequest(reservation_id="r", **prompt), b"")
            for prompt in prompts
        ]

    assert fingerprint(np.array(TOKENS, dtype=kind)) == fingerprint(TOKENS)
