"""The compiled way of events against its plain twin: same batches, same index, same books.

Whatever the bytes are, the reader says what `wire` says or leaves it to `wire`; whatever the
messages are, a stream that is fed the compiled way stands where one that is not would stand.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.compiled import kernels_in_use
from indexer.core import wire
from indexer.core.events import EventBatch
from indexer.core.wire import BatchDecoder, decode_plain
from indexer.types import Scope
from tests.effort import examples, share_of
from tests.indexer.encoding import ARRAY_FIELDS, comparable, encode_batch, removed, stored

pytestmark = pytest.mark.skipif(
    not kernels_in_use().get("indexer._ingest"), reason="not built, or not wanted"
)

BLOCK_SIZE = 4
SCOPE = Scope("m", "t")
encode = msgspec.msgpack.encode
MEDIA = "0123456789abcdef" * 4


def plainly(payload: bytes, form: str) -> EventBatch | None:
    """What the twin reads."""
    decoder = BatchDecoder()
    decoder._form = form
    with mock.patch.object(wire, "decode_plain", return_value=None):
        return decoder.decode(payload)


# -- the reader ------------------------------------------------------------------------------------

_ints = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.integers(-40, 40),
    st.sampled_from([0, 127, 128, 255, 256, 65535, 65536, 1 << 31, (1 << 32) - 1, 1 << 32]),
)
_names = st.lists(st.one_of(_ints, st.binary(max_size=40)), max_size=4)
_tokens = st.lists(st.one_of(st.integers(0, 200_000), _ints), max_size=20)
_junk = st.one_of(st.none(), st.booleans(), _ints, st.floats(), st.text(max_size=4), st.binary())
_keys = st.sampled_from(
    [
        "adapter",
        "salt",
        "adapter",
        "",
        MEDIA,
        MEDIA[:-1],
        [MEDIA, 0],
        [MEDIA[:16].upper(), -5],
        [MEDIA[:15], 0],
        [],
        [None],
        [MEDIA, 1, None],
        [MEDIA, [1]],
        b"digest",
        "s\xe4lt",
    ]
)
_colours = st.lists(st.one_of(st.none(), st.lists(_keys, max_size=3)), max_size=4)
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "block_hashes": _names,
    "parent_block_hash": st.one_of(st.none(), _ints, st.binary(max_size=9)),
    "token_ids": _tokens,
    "block_size": st.one_of(st.integers(0, 64), _ints),
    "lora_id": st.one_of(st.none(), _junk),
    "medium": st.sampled_from([None, "GPU", "CPU", "gpu", "Cpu_Tier2", "DISK", "", "moon", "FS\0"]),
    "lora_name": st.sampled_from([None, "", "adapter", "\xe4", {"cache_salt": "s"}, {"a": 1}]),
    "extra_keys": st.one_of(
        st.none(), st.lists(st.none(), max_size=4), st.lists(st.lists(_junk), max_size=3), _colours
    ),
    "group_idx": st.one_of(st.none(), st.integers(-1, 3), _ints),
    "kv_cache_spec_kind": st.sampled_from(
        [None, "full_attention", "mla_attention", "sliding_window", "f\xfcll_attention"]
    ),
    "locality": st.sampled_from([None, "LOCAL", "REMOTE", "local", ""]),
    "cache_salt": st.sampled_from([None, "", "salt"]),
    "mm_keys": st.sampled_from([None, [], [None], [[{"hash": "00ff", "start_offset": 0}]]]),
    "block_mm_infos": st.sampled_from([None, [], [None]]),
    "session_id": _junk,
    "ownership": st.recursive(_junk, lambda inner: st.lists(inner, max_size=3), max_leaves=4),
}
_PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "lora_id": st.sampled_from([None, None, 3]),
    "medium": st.sampled_from([None, "GPU", "CPU", "cpu", "DISK", "EXTERNAL"]),
    "lora_name": st.sampled_from([None, None, "", "adapter"]),
    "group_idx": st.sampled_from([None, 0, 1]),
    "kv_cache_spec_kind": st.sampled_from([None, "full_attention", "sliding_window"]),
    "block_size": st.integers(0, 64),
    "token_ids": st.lists(st.integers(0, 200_000), max_size=20),
    "extra_keys": st.one_of(st.none(), st.none(), _colours),
    "cache_salt": st.sampled_from([None, None, "", "salt"]),
    "mm_keys": st.none(),
    "block_mm_infos": st.none(),
    "locality": st.sampled_from([None, "LOCAL"]),
    "parent_block_hash": st.one_of(st.none(), _ints),
    "block_hashes": st.lists(_ints, max_size=4),
}
_KINDS = ["BlockStored", "BlockRemoved", "AllBlocksCleared", "Ignored", "Unknown"]


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    """An event with all, some or none of its fields, of the right types or not."""
    kind = draw(st.sampled_from(_KINDS[:2] * 4 + _KINDS))
    fields = _FIELDS if draw(st.integers(0, 4)) == 0 else _FIELDS | _PLAIN
    wanted = [*ARRAY_FIELDS.get(kind, ()), "locality", "cache_salt", "session_id", "ownership"]
    event: dict[str, Any] = {"type": kind}
    for name in wanted:
        if name not in fields or draw(st.integers(0, 12)) == 0:
            continue
        event[name] = draw(fields[name])
    if draw(st.integers(0, 20)) == 0:
        event[draw(st.sampled_from([*_FIELDS, "type"]))] = draw(_junk)
    return event


def shaped(event: dict[str, Any], form: str) -> Any:
    if form == "map":
        return event
    return [event["type"], *(event.get(f) for f in ARRAY_FIELDS.get(str(event["type"]), ()))]


def aged(event: Any, fields: int | None) -> Any:
    """An event in an array as an earlier engine wrote it, which had fewer fields."""
    return event if fields is None or not isinstance(event, list) else event[: 1 + fields]


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    """A batch as an engine writes it, or nearly."""
    form = draw(st.sampled_from(["map", "array"]))
    fields = draw(st.sampled_from([None, None, 10, 9, 8, 8, 7, 5]))  # 9: with a group
    told = [aged(shaped(event, form), fields) for event in draw(st.lists(events(), max_size=5))]
    if told and draw(st.integers(0, 15)) == 0:
        told[0] = draw(_junk)
    ts = draw(st.one_of(st.floats(), st.integers(0, 9)))
    rank = draw(st.sampled_from([None, 0, 1, -1, 1 << 63, "0"]))
    return encode([ts, told, rank][: draw(st.sampled_from([3, 3, 3, 2]))])


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A batch that something happened to on its way."""
    payload = bytearray(draw(payloads()))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(payload) - 1, 0)))
        change = draw(st.sampled_from(["set", "cut", "insert", "drop"]))
        if change == "set" and payload:
            payload[at] = draw(st.integers(0, 255))
        elif change == "cut":
            del payload[at:]
        elif change == "insert":
            payload[at:at] = draw(st.binary(min_size=1, max_size=6))
        else:
            del payload[at : at + 1]
    return bytes(payload)


PAYLOADS = st.one_of(payloads(), damaged(), st.binary(max_size=60))


def says_what_the_twin_says_or_nothing(payload: bytes, form: str) -> None:
    read = decode_plain(payload, form)
    if read is not None:
        assert comparable(read) == comparable(plainly(payload, form))


@settings(max_examples=examples(200))
@given(PAYLOADS, st.sampled_from(["map", "array"]))
def test_the_reader_says_what_the_twin_says_or_nothing(payload: bytes, form: str) -> None:
    says_what_the_twin_says_or_nothing(payload, form)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=share_of(20_000))
@given(PAYLOADS, st.sampled_from(["map", "array"]))
def test_the_reader_says_what_the_twin_says_for_long(payload: bytes, form: str) -> None:
    says_what_the_twin_says_or_nothing(payload, form)


@pytest.mark.parametrize("form", ["map", "array"])
def test_what_engines_mostly_send_is_read(form: str) -> None:
    told = [
        stored([1, 2], [*range(32)], None, lora_id=None, medium="GPU", lora_name=None),
        stored([1 << 63, 7], [0xFFFFFFFF] * 32, 2, medium=None, extra_keys=[None, None]),
        stored([b"\x01" * 32], [1] * 16, b"\x02" * 16, kv_cache_spec_kind="sliding_window"),
        removed([3], medium="GPU"),
        removed([4, 5], medium="GPU"),
        removed([6], medium="CPU"),
        {"type": "AllBlocksCleared"},
        stored([8], [1] * 16, 7, medium="cpu_tier1"),
        stored([9], [], None, block_size=0, medium="CPU"),
        removed([9], medium="STORAGE"),
        removed([9], medium="storage"),
        stored([1], [1] * 16, lora_id=3, lora_name="a", extra_keys=[["a", "a"]]),
        stored([2], [1] * 16, 1, lora_id=3, lora_name=None),
        stored([3, 4], [1] * 32, extra_keys=[["salt"], []]),
        stored([5, 6], [1] * 32, extra_keys=[None, [[MEDIA, -3], [MEDIA[::-1], 5, 7]]]),
        stored([5, 6], [1] * 32, extra_keys=[[[MEDIA, 0], MEDIA.upper()], [[MEDIA, -16]]]),
    ]
    told.append(stored([5, 6], [1] * 32, lora_name=MEDIA, extra_keys=[[MEDIA, MEDIA], [MEDIA]]))
    payload = encode_batch(told, f"{form}-int", rank=0)
    read = decode_plain(payload, form)
    assert read is not None
    assert comparable(read) == comparable(plainly(payload, form))
    assert read.events[-1].cache_salt == MEDIA  # type: ignore[union-attr]
    assert len(read.events) == 16, "two removals are one if they say the same of the same medium"


def test_a_salt_is_read_where_sglang_puts_it() -> None:
    told = [stored([1], [1] * 16, lora_name={"cache_salt": "s"}), stored([2], [2] * 16)]
    payload = encode_batch(told, "array-int", rank=0)
    read = decode_plain(payload, "array")
    assert read is not None
    assert comparable(read) == comparable(plainly(payload, "array"))
    payload = encode_batch([stored([1], [1] * 16, 2, cache_salt="s")], "map-int", rank=0)
    read = decode_plain(payload, "map")
    assert read is not None
    assert comparable(read) == comparable(plainly(payload, "map"))


@pytest.mark.parametrize(
    "payload",
    [
        encode([1.0, [], 0]),  # of no form at all
        encode([1.0, [stored([1], [1] * 16, lora_name="ä")], 0]),
        encode([1.0, [stored([1], [1] * 16, lora_name={"cache_salt": "s"})], 0]),
        encode([1.0, [stored([1], [1] * 16, medium="moon")], 0]),
        encode([1.0, [stored([1], [1] * 16, 2, extra_keys=[["no salt"]])], 0]),
        encode([1.0, [stored([1], [1] * 16, extra_keys=[["salt", "and another"]])], 0]),
        encode([1.0, [stored([1], [1] * 16, extra_keys=[[b"of an embedding"]])], 0]),
        encode([1.0, [stored([1], [1] * 16, extra_keys=[[["of nobody's making", 0]]])], 0]),
        encode([1.0, [stored([1], [1] * 16, extra_keys=[["salt"], None])], 0]),
        encode([1.0, [stored([1], [1] * 16, mm_keys=[None])], 0]),
        encode([1.0, [stored([1], [1 << 32] * 16)], 0]),
        encode([1.0, [stored([1], [-1] * 16)], 0]),
        encode([1.0, [stored([True], [1] * 16)], 0]),
        encode([1.0, [stored([b""], [1] * 16)], 0]),
        encode([1.0, [stored([1], [1] * 16)], 0]) + b"\0",
        encode([1.0, [stored([1], [1] * 16)], 0])[:-1],
        encode([1.0, [{"type": "BlockStored", "type2": 1}], 0]),
        encode([1.0, [removed([1], locality="REMOTE")], 0]),
        b"\x93\xcb\0\0\0\0\0\0\0\0\xdd\xff\xff\xff\xff\xc0",  # a list longer than the message
        # a field nobody knows, the head of which lies: what follows is not its map of nothing
        b"\x93\xcb\0\0\0\0\0\0\0\0\x91\x82\xa4type\xb0AllBlocksCleared\xa1x\xdc\xff\xff\x80\0",
        b"",
    ],
)
def test_what_is_not_plain_is_left_to_the_twin(payload: bytes) -> None:
    assert decode_plain(payload, "map") is None
