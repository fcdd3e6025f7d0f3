"""Every engine's bytes, and bytes no engine would send."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.core.events import (
    JOINED_BLOCKS_MAX,
    AllBlocksCleared,
    BadEvent,
    BlockRemoved,
    BlockStored,
    Ignored,
)
from indexer.core.normalize import MEDIA
from indexer.core.wire import BatchDecoder
from indexer.types import U64_MASK, Tier
from tests.effort import examples, share_of
from tests.indexer.encoding import CLEARED, encode_batch, encode_event, removed, stored
from tests.indexer.golden import golden

ENGINES = [
    "sglang_0.4.6.post5",
    "sglang_0.5.18",
    "sglang_0.5.23",
    "vllm_0.9.0",
    "vllm_0.10.2",
    "vllm_0.14.1",
    "vllm_0.23.0",
    "vllm_0.24.0",
    "vllm_0.33.0",
]
encode = msgspec.msgpack.encode


def _messages() -> list[Any]:
    found = []
    for engine in ENGINES:
        for at, one in enumerate(golden(f"events/vectors_{engine}.json")["messages"]):
            found.append(pytest.param(one, id=f"{engine}-{at}"))
    mocker = golden("events/mocker_vectors.json")
    for at, one in enumerate(mocker["messages"] + mocker["messages_with_evictions"]):
        found.append(pytest.param(one, id=f"mocker-{at}"))
    return found


def _u64(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, dict):
        return int.from_bytes(bytes.fromhex(value["bytes"])[-8:], "big")
    return value & U64_MASK  # type: ignore[no-any-return]


@pytest.mark.parametrize("one", _messages())
def test_vector_decodes_to_its_meaning(one: dict[str, Any]) -> None:
    is_eagle = "bigram" in one.get("note", "")
    batch = BatchDecoder(is_eagle=is_eagle).decode(bytes.fromhex(one["payload"]))
    meaning = one["meaning"]
    assert batch is not None
    assert batch.ts == meaning["ts"]
    assert batch.dp_rank == meaning.get("dp_rank")
    assert len(batch.events) == len(meaning["events"])
    for event, told in zip(batch.events, meaning["events"], strict=True):
        _check_event(event, told)


def _check_event(event: Any, told: dict[str, Any]) -> None:
    assert type(event).__name__ == told["type"]
    if isinstance(event, AllBlocksCleared):
        return
    assert event.block_hashes == [_u64(value) for value in told["block_hashes"]]
    medium = told.get("medium")
    assert event.tier is (Tier.DEVICE if medium is None else MEDIA[medium])
    assert event.group == (told.get("group_idx") or 0)
    assert event.is_remote == (told.get("locality") == "REMOTE")
    if not isinstance(event, BlockStored):
        return
    assert event.parent == _u64(told.get("parent_block_hash"))
    assert [list(t) if isinstance(t, tuple) else t for t in event.token_ids] == told["token_ids"]
    assert event.block_size == told["block_size"]
    assert event.lora_name == (told.get("lora_name") or "")
    assert event.has_nameless_adapter == bool(told.get("lora_id") and not told.get("lora_name"))
    assert event.attention == told.get("kv_cache_spec_kind")
    _check_colours(event, told)


def _check_colours(event: BlockStored, told: dict[str, Any]) -> None:
    extra = told.get("extra_keys")
    metadata = told.get("metadata") or ""
    salted = extra and extra[0] == ["tenant-a"]
    assert event.cache_salt == (
        "tenant-a" if salted or "tenant-a" in metadata else told.get("cache_salt") or ""
    )
    has_media = any(key and isinstance(key[0], list) for key in extra or [])
    assert (event.mm_hashes is not None) == has_media
    has_embeddings = any(key and isinstance(key[0], dict) for key in extra or [])
    assert (event.opaque is not None) == has_embeddings


# -- shapes of batches ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        [1.0, [CLEARED]],
        [1, [CLEARED], None],
        [1.0, [CLEARED], None, "later", {"fields": 1}],
        [None, [CLEARED], -1],
        [1.0, [CLEARED], "0"],
        ["now", [CLEARED], True],
        {"events": [CLEARED]},
        {"ts": 1.0, "events": [CLEARED], "dp_rank": None, "more": [1]},
    ],
)
def test_batches_come_in_many_shapes(batch: Any) -> None:
    decoded = BatchDecoder().decode(encode(batch))
    assert decoded is not None
    assert decoded.events == [AllBlocksCleared()]
    assert decoded.dp_rank is None


@pytest.mark.parametrize("name", ["dp_rank", "data_parallel_rank", "attn_dp_rank"])
def test_a_map_names_its_rank(name: str) -> None:
    decoded = BatchDecoder().decode(encode({"ts": 2, "events": [], name: 3}))
    assert decoded is not None
    assert (decoded.ts, decoded.dp_rank) == (2.0, 3)


@pytest.mark.parametrize(
    "batch", [[], [1.0], [1.0, None], [1.0, {}], {}, {"ts": 1.0}, 5, "x", None]
)
def test_what_is_no_batch(batch: Any) -> None:
    assert BatchDecoder().decode(encode(batch)) is None


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x93", b"\x91" * 10_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1"],
    ids=["empty", "truncated", "nested", "array bomb", "bytes bomb", "reserved"],
)
def test_hostile_bytes(payload: bytes) -> None:
    assert BatchDecoder().decode(payload) is None
    assert BatchDecoder(is_eagle=True).decode(payload) is None


def test_positional_and_map_events_share_a_batch() -> None:
    events = [
        stored([1], list(range(16)), medium="cpu"),
        removed([1]),
        CLEARED,
        {"type": "Ignored"},
    ]
    forms = [encode_event(e, "map-int") for e in events]
    forms += [encode_event(e, "array-int") for e in events[:3]] + [["Ignored", 1, 2]]
    batch = BatchDecoder().decode(encode([1.0, forms]))
    assert batch is not None
    assert batch.events[:4] == batch.events[4:]
    assert batch.events[3] == Ignored()
    assert batch.form == "mixed"


@pytest.mark.parametrize("form", ["map-int", "array-int", "map-bytes"])
def test_removals_in_a_row_are_one(form: str) -> None:
    events = [
        removed([1]),
        removed([2, 3]),
        removed([4], medium="cpu"),
        removed([5], medium="cpu", group_idx=1),
        removed([6], medium="cpu", group_idx=1),
        stored([1], TOKENS),
        removed([7]),
        removed([]),
        removed([8]),
        CLEARED,
        removed([9]),
    ]
    decoder = BatchDecoder()
    payload = encode([1.0, [encode_event(e, form) for e in events]])
    decoder.decode(payload)  # gets to know the dialect; a first guess that is wrong joins nothing
    batch = decoder.decode(payload)
    assert batch is not None
    assert [
        (event.block_hashes, event.tier, event.group, event.events)
        if isinstance(event, BlockRemoved)
        else event.kind
        for event in batch.events
    ] == [
        ([1, 2, 3], Tier.DEVICE, 0, 2),
        ([4], Tier.HOST_PINNED, 0, 1),
        ([5, 6], Tier.HOST_PINNED, 1, 2),
        "stored",
        ([7], Tier.DEVICE, 0, 1),
        ([], Tier.DEVICE, 0, 1),
        ([8], Tier.DEVICE, 0, 1),
        "cleared",
        ([9], Tier.DEVICE, 0, 1),
    ]


def test_remote_removals_are_not_joined_with_local_ones() -> None:
    events = [removed([1]), removed([2], locality="REMOTE"), removed([3], locality="REMOTE")]
    batch = BatchDecoder().decode(encode([1.0, events]))
    assert batch is not None
    assert [(e.block_hashes, e.is_remote) for e in batch.events if isinstance(e, BlockRemoved)] == [
        ([1], False),
        ([2, 3], True),
    ]


def test_a_row_of_removals_is_joined_up_to_a_bound() -> None:
    events = [removed([number]) for number in range(2 * JOINED_BLOCKS_MAX + 1)]
    batch = BatchDecoder().decode(encode([1.0, events]))
    assert batch is not None
    said = [event.events for event in batch.events if isinstance(event, BlockRemoved)]
    assert said == [JOINED_BLOCKS_MAX, JOINED_BLOCKS_MAX, 1]


def test_the_dialect_is_remembered() -> None:
    decoder = BatchDecoder()
    for form in ("array-int", "array-int", "map-int", "array-bytes"):
        batch = decoder.decode(encode_batch([removed([7])], form))
        assert batch is not None
        assert batch.form == form.split("-")[0]


# -- one bad event costs itself only -------------------------------------------------------------

TOKENS = list(range(16))
GOOD = removed([9])


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"type": "BlockMoved", "block_hashes": [1]}, "unknown_tag"),
        (["BlockMoved", [1]], "unknown_tag"),
        ([7], "malformed"),
        ([], "malformed"),
        ({}, "malformed"),
        (5, "malformed"),
        ({"type": "BlockRemoved"}, "malformed"),
        (["BlockStored", [1], None], "malformed"),
        *(
            (removed([value]), "malformed")
            for value in (True, 1.0, None, b"", "0x12", [1], {"hash": 1})
        ),
        (stored([1], TOKENS, b""), "malformed"),
        (stored([1], [*TOKENS[:-1], "15"]), "malformed"),
        (stored([1], [*TOKENS[:-1], 1.0]), "malformed"),
        (stored([1], [*TOKENS[:-1], True]), "malformed"),
        (stored([1], [[t, t + 1] for t in TOKENS]), "eagle_mismatch"),
        (stored([1], TOKENS) | {"block_size": -16}, "malformed"),
        (stored([1], TOKENS, medium=3), "malformed"),
        (stored([1], TOKENS, group_idx=-1), "malformed"),
        (removed([1], group_idx=1 << 40), "malformed"),
        (stored([1, 2], TOKENS * 2, extra_keys=[None]), "malformed"),
        (stored([1], TOKENS, lora_name={"cache_salt": 5}), "malformed"),
    ],
)
def test_a_bad_event_costs_itself_only(event: Any, reason: str) -> None:
    batch = BatchDecoder().decode(encode([1.0, [GOOD, event, GOOD]]))
    assert batch is not None
    assert batch.events[1] == BadEvent(reason)
    assert batch.events[0] == batch.events[2] == BlockRemoved(block_hashes=[9], tier=Tier.DEVICE)


def test_text_that_is_not_utf8_costs_its_event_only() -> None:
    bad = encode(removed([1], medium="XX")).replace(b"XX", b"\xff\xfe")
    good = encode(GOOD)
    batch = BatchDecoder().decode(b"\x92" + encode(1.0) + b"\x92" + bad + good)
    assert batch is not None
    assert [event.kind for event in batch.events] == ["unreadable", "removed"]


# -- fields --------------------------------------------------------------------------------------


def _one(event: Any, **options: Any) -> Any:
    batch = BatchDecoder(**options).decode(encode([1.0, [event]]))
    assert batch is not None
    return batch.events[0]


def test_signed_unsigned_and_digest_are_one_hash() -> None:
    digest = b"\x01" * 24 + b"\xff" * 7 + b"\xfb"
    assert _one(removed([-5, (1 << 64) - 5, digest])).block_hashes == [U64_MASK - 4] * 3
    assert _one(removed([b"\x01\x02", 0])).block_hashes == [0x0102, 0]


@pytest.mark.parametrize(("name", "tier"), MEDIA.items())
def test_media_in_any_case(name: str, tier: Tier) -> None:
    assert _one(removed([1], medium=name)).tier is tier
    assert _one(removed([1], medium=name.lower())).tier is tier
    assert _one(removed([1], medium=name.title())).tier is tier


def test_a_medium_nobody_knows_is_no_tier() -> None:
    assert _one(removed([1], medium="TAPE")).tier is None
    assert _one(removed([1], medium="")).tier is None


ID = "ab" * 32
MM = 0xABABABABABABABAB


@pytest.mark.parametrize(
    ("extra_keys", "lora", "parent", "salt", "media", "opaque"),
    [
        ([None, None], None, None, "", None, set()),
        ([["s"], None], None, None, "s", None, set()),
        ([["a"], ["a"]], "a", None, "", None, set()),
        ([["a", "s"], ["a"]], "a", None, "s", None, set()),
        ([["a", "a"], ["a"]], "a", None, "a", None, set()),
        ([["s"], None], None, 5, "", None, {0}),  # only a root has a salt
        ([None, ["s"]], None, None, "", None, {1}),
        ([["s", "t"], None], None, None, "s", None, {0}),
        ([[[ID, 3]], [[ID, -13]]], None, None, "", [[MM], [MM]], set()),
        ([[ID], None], None, None, ID, None, set()),  # media are lists: it is a digest as a salt
        ([[ID.upper()], None], None, None, ID.upper(), None, set()),
        ([[ID[:63]], None], None, None, ID[:63], None, set()),
        ([["5"], None], None, None, "5", None, set()),
        ([[[ID, 0], ID], [[ID, -16]]], None, None, ID, [[MM], [MM]], set()),
        ([[ID], [ID]], ID, None, "", None, set()),  # the adapter
        ([[ID, ID], [ID]], ID, None, ID, None, set()),
        ([[ID, [ID, 0], ID, b"digest"], [ID]], ID, None, ID, [[MM], []], {0}),
        ([[ID], None], None, 5, "", None, {0}),
        ([None, [ID]], None, None, "", None, {1}),
        ([["a", [ID, 0], "s"], ["a"]], "a", None, "s", [[MM], []], set()),
        ([[[ID[:16] + "0" * 48, 0]], None], None, None, "", [[MM], []], set()),
        ([[["my-image", 0]], [[]]], None, None, "", None, {0, 1}),
        ([[[5, 0]], [7]], None, None, "", None, {0, 1}),
        ([[b"digest"], None], None, None, "", None, {0}),
    ],
)
def test_extra_keys(
    extra_keys: Any, lora: str | None, parent: Any, salt: str, media: Any, opaque: set[int]
) -> None:
    event = stored([1, 2], TOKENS * 2, parent, lora_name=lora, extra_keys=extra_keys)
    for form in ("map-int", "array-int"):
        got = _one(encode_event(event, form))
        assert (got.cache_salt, got.mm_hashes) == (salt, media)
        assert set(got.opaque or ()) == opaque
        assert got.lora_name == (lora or "")


@pytest.mark.parametrize(
    ("extra_keys", "lora", "parent", "salt", "media", "opaque"),
    [
        ([[ID], None], None, None, "", [[MM], []], set()),  # may be a salt: taken for an image
        ([[ID.upper()], [ID]], None, None, "", [[MM], [MM]], set()),
        ([[ID, "s"], [ID]], None, None, "s", [[MM], [MM]], set()),
        ([[ID[:63]], None], None, None, ID[:63], None, set()),
        ([[ID], [ID]], ID, None, "", None, set()),  # the adapter
        ([["a", ID, "s"], ["a", ID]], "a", None, "s", [[MM], [MM]], set()),
        ([[ID], None], None, 5, "", [[MM], []], set()),
    ],
)
def test_extra_keys_of_arrays_without_groups(
    extra_keys: Any, lora: str | None, parent: Any, salt: str, media: Any, opaque: set[int]
) -> None:
    """As of vLLM 0.17 to 0.19, where media items are bare identifiers."""
    event = stored([1, 2], TOKENS * 2, parent, lora_name=lora, extra_keys=extra_keys)
    short = encode_event(event, "array-int")[:9]
    assert short[-1] == extra_keys
    got = _one(short)
    assert (got.cache_salt, got.mm_hashes, got.lora_name) == (salt, media, lora or "")
    assert set(got.opaque or ()) == opaque


def test_media_of_other_producers() -> None:
    keys = [[{"type": "mm_key", "hash": ID, "start_offset": 0}], None]
    assert _one(stored([1, 2], TOKENS * 2, mm_keys=keys)).mm_hashes == [[MM], []]
    infos = [None, {"mm_objects": [{"mm_hash": MM, "offsets": [[0, 4]]}]}]
    assert _one(stored([1, 2], TOKENS * 2, block_mm_infos=infos)).mm_hashes == [[], [MM]]
    strange = _one(stored([1, 2], TOKENS * 2, mm_keys=[[{"hash": 5}], ["x"]]))
    assert (strange.mm_hashes, set(strange.opaque)) == (None, {0, 1})
    strange = _one(stored([1], TOKENS, block_mm_infos=[{"mm_objects": [{"mm_hash": "x"}, 5]}]))
    assert set(strange.opaque) == {0}
    assert _one(stored([1], TOKENS, block_mm_infos=[{"mm_objects": 5}])).opaque is None
    assert _one(stored([1], TOKENS, mm_keys=[[], []])) == BadEvent("malformed")


def test_an_adapter_without_a_name() -> None:
    assert _one(stored([1], TOKENS, lora_id=3)).has_nameless_adapter
    assert not _one(stored([1], TOKENS, lora_id=3, lora_name="a")).has_nameless_adapter


def test_pairs_of_tokens_are_for_eagle_scopes() -> None:
    pairs = [[t, t + 1] for t in TOKENS]
    for form in ("map-int", "array-int"):
        event = encode_event(stored([1], pairs), form)
        assert _one(event, is_eagle=True).token_ids == [tuple(pair) for pair in pairs]
        assert _one(encode_event(stored([1], TOKENS), form), is_eagle=True) == BadEvent(
            "eagle_mismatch"
        )
    assert _one(stored([1], [], block_size=0) | {"block_size": 0}, is_eagle=True).is_placeholder


# -- anything at all -----------------------------------------------------------------------------

SCRAPS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=12,
)
NAMES = st.sampled_from(
    ["type", "block_hashes", "token_ids", "block_size", "medium", "extra_keys", "lora_name"]
)
EVENTS = (
    st.dictionaries(NAMES, SCRAPS).map(lambda fields: {"type": "BlockStored", **fields})
    | st.lists(SCRAPS, max_size=12).map(lambda fields: ["BlockStored", *fields])
    | SCRAPS
)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_survived(payload: bytes, is_eagle: bool) -> None:
    BatchDecoder(is_eagle=is_eagle).decode(payload)


def keep_their_places(events: list[Any], ts: Any, rank: Any) -> None:
    batch = BatchDecoder().decode(encode([ts, [*events, GOOD], rank]))
    assert batch is not None
    said = [event.events if isinstance(event, BlockRemoved) else 1 for event in batch.events]
    assert sum(said) == len(events) + 1
    last = batch.events[-1]
    assert isinstance(last, BlockRemoved)
    assert last.block_hashes[-1] == 9


@settings(max_examples=examples(40))
@given(st.lists(EVENTS, max_size=4), SCRAPS, SCRAPS)
def test_any_events_keep_their_places(events: list[Any], ts: Any, rank: Any) -> None:
    keep_their_places(events, ts, rank)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=share_of(2_000))
@given(st.lists(EVENTS, max_size=4), SCRAPS, SCRAPS)
def test_any_events_keep_their_places_for_long(events: list[Any], ts: Any, rank: Any) -> None:
    keep_their_places(events, ts, rank)


REAL = [bytes.fromhex(p.values[0]["payload"]) for p in _messages()]


@given(st.sampled_from(REAL), st.data())
def test_damaged_payloads_are_survived(payload: bytes, data: st.DataObject) -> None:
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    decoder = BatchDecoder()
    decoder.decode(bytes(damaged))
    decoder.decode(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))
