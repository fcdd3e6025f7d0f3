"""Long messages of any kind, read in pieces of any size: the same events as read in one go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.core import piecewise as pieces_module
from indexer.core import plain_walk
from indexer.core.events import BadEvent, BlockStored
from indexer.core.packed import PackedBytes, PackedLists
from indexer.core.piecewise import PiecewiseDecoder
from indexer.core.wire import BatchDecoder
from indexer.types import U64_MASK
from tests.effort import examples, share_of
from tests.indexer.core.test_ingest import PAYLOADS
from tests.indexer.core.test_wire import EVENTS, REAL, SCRAPS
from tests.indexer.encoding import encode_batch, encode_event, removed, stored
from tests.indexer.kernels import twins

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.core.events import EventBatch

encode = msgspec.msgpack.encode

WALKERS = twins("indexer._wire", plain_walk)


@pytest.fixture(params=WALKERS, autouse=True)
def _walker(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cut with the kernel and without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "walk", request.param.walk)
        yield


def comparable(batch: EventBatch | None) -> Any:
    """Packed or not, numbers are what they are modulo 2^64."""
    if batch is None:
        return None
    events = []
    for event in batch.events:
        told = msgspec.structs.asdict(event) | {"is": type(event)}
        if "block_hashes" in told:
            told["block_hashes"] = [*told["block_hashes"]]
        if "token_ids" in told:
            told["token_ids"] = [
                tuple(n & U64_MASK for n in one) if isinstance(one, tuple) else one & U64_MASK
                for one in told["token_ids"]
            ]
            told["mm_hashes"] = told["mm_hashes"] and [[*one] for one in told["mm_hashes"]]
            told["opaque"] = told["opaque"] and sorted(told["opaque"].items())
        events.append(told)
    return repr(events), repr(batch.ts), batch.dp_rank, batch.form


def in_pieces(payload: bytes, form: str, *, bigram: bool, values: int) -> EventBatch | None:
    reading = PiecewiseDecoder(payload, form, bigram=bigram, values=values)
    while not reading.go_on():
        pass
    return reading.batch


def as_a_whole(payload: bytes, form: str, *, bigram: bool) -> EventBatch | None:
    decoder = BatchDecoder(is_eagle=bigram)
    decoder._form = form
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("indexer.core.wire.decode_plain", lambda _payload, _form: None)
        return decoder.decode(payload)


def says_the_same(payload: bytes, form: str, values: int, *, bigram: bool) -> None:
    if payload:
        whole = as_a_whole(payload, form, bigram=bigram)
        read = in_pieces(payload, form, bigram=bigram, values=values)
        assert comparable(read) == comparable(whole)


# -- what is long --------------------------------------------------------------------------------

_media = st.sampled_from(["0" * 64, "f" * 16, "name", "a" * 15])
_entry: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.just([]),
    st.just(["adapter"]),
    st.lists(st.one_of(_media, st.tuples(_media, st.integers(0, 3)), st.binary(max_size=3))),
)
_info: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.just({}),
    st.lists(st.fixed_dictionaries({"mm_hash": st.integers(-2, 1 << 64)}), max_size=2).map(
        lambda objects: {"mm_objects": [one for one in objects if one["mm_hash"] < 1 << 64]}
    ),
)
_key = st.one_of(_media, st.fixed_dictionaries({"hash": _media}))


@st.composite
def long_events(draw: st.DrawFn) -> dict[str, Any]:
    """An event of many blocks with everything that can colour them, whole or nearly."""
    names = draw(
        st.lists(
            st.one_of(st.integers(-9, 1 << 63), st.binary(min_size=1, max_size=9)), max_size=30
        )
    )
    if draw(st.integers(0, 2)) == 0:
        return removed(names, medium=draw(st.sampled_from([None, "GPU", "gpu", "CPU"])))
    blocks = max(0, len(names) + draw(st.sampled_from([0] * 9 + [1, -1])))
    tokens = draw(st.lists(st.integers(0, 1 << 17), max_size=40))
    if draw(st.integers(0, 9)) == 0:
        tokens.append(draw(st.sampled_from([-1, 1 << 32, (1 << 64) - 1])))
    event = stored(names, tokens, draw(st.sampled_from([None, 5])), block_size=2)
    for field, one in (
        ("extra_keys", _entry),
        ("mm_keys", st.lists(_key)),
        ("block_mm_infos", _info),
    ):
        if draw(st.integers(0, 2)) == 0:
            event[field] = draw(st.lists(one, min_size=blocks, max_size=blocks))
    for field, text in (("lora_name", "adapter"), ("cache_salt", "salt"), ("lora_id", 3)):
        if draw(st.booleans()):
            event[field] = text
    if draw(st.booleans()):
        event["later"] = draw(SCRAPS)
    order = draw(st.permutations([*event]))
    return {name: event[name] for name in order}


@st.composite
def long_batches(draw: st.DrawFn) -> bytes:
    form = draw(st.sampled_from(["map-int", "array-int", "mixed-int"]))
    told = draw(st.lists(long_events(), max_size=5))
    if form == "map-int":
        return encode([1.5, told, draw(st.sampled_from([None, 1, -1, "x", [1] * 20]))])
    for event in told:
        event["block_hashes"] = [n if isinstance(n, int) else 7 for n in event["block_hashes"]]
        event.pop("later", None)
    is_of_old = form == "array-int" and draw(st.booleans())  # of the time before groups
    if is_of_old:
        return encode([1.0, [encode_event(event, form)[:9] for event in told], None])
    return encode_batch(told, form)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    payload = bytearray(draw(st.one_of(long_batches(), st.sampled_from(REAL))))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(payload) - 1))
        change = draw(st.sampled_from(["set", "cut", "insert", "drop"]))
        if change == "set":
            payload[at] = draw(st.integers(0, 255))
        elif change == "cut":
            del payload[at + 1 :]
        elif change == "insert":
            payload[at:at] = draw(st.binary(min_size=1, max_size=6))
        elif len(payload) > 1:
            del payload[at]
    return bytes(payload)


ANY_BATCH = st.tuples(SCRAPS, st.lists(EVENTS, max_size=4), SCRAPS).map(encode)
MAP_BATCH = st.dictionaries(
    st.sampled_from(["ts", "events", "dp_rank", "attn_dp_rank", "data_parallel_rank", "more"]),
    st.one_of(SCRAPS, st.integers(-1, 3), st.lists(EVENTS, max_size=3)),
).map(encode)
ANYTHING = st.one_of(
    long_batches(), damaged(), st.sampled_from(REAL), PAYLOADS, ANY_BATCH, MAP_BATCH
)
SIZES = st.one_of(st.integers(1, 9), st.integers(10, 300))
WAYS = (ANYTHING, st.sampled_from(["map", "array"]), SIZES, st.booleans())


@settings(max_examples=examples(150))
@given(*WAYS)
def test_read_in_pieces_is_read_in_one_go(
    payload: bytes, form: str, values: int, bigram: bool
) -> None:
    says_the_same(payload, form, values, bigram=bigram)


@pytest.mark.parametrize("values", [1, 3, 50])
def test_every_recorded_batch_is_read_in_pieces(values: int) -> None:
    for payload in REAL:
        for form in ("map", "array"):
            says_the_same(payload, form, values, bigram=False)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@settings(max_examples=share_of(6_000))
@given(*WAYS)
def test_read_in_pieces_is_read_in_one_go_for_long(
    payload: bytes, form: str, values: int, bigram: bool
) -> None:
    says_the_same(payload, form, values, bigram=bigram)


# -- what is long in itself ------------------------------------------------------------------------


def test_names_and_tokens_of_a_long_event_are_packed() -> None:
    names = [*range(1 << 60, (1 << 60) + 600)]
    event = stored(names, [7] * 9_600, lora_name="adapter", extra_keys=[["adapter"]] * 600)
    batch = in_pieces(encode_batch([event]), "map", bigram=False, values=100)
    assert batch is not None
    (read,) = batch.events
    assert isinstance(read, BlockStored)
    assert isinstance(read.block_hashes, memoryview)
    assert isinstance(read.token_ids, memoryview)
    assert (read.block_hashes.format, read.token_ids.format) == ("Q", "I")
    assert read.block_hashes.tolist() == names


@pytest.mark.parametrize("key", [["a" * 64], [{"x": 1}], [["f" * 16, 3]]])
def test_keys_of_a_long_event_are_made_when_they_are_asked_for(key: list[Any]) -> None:
    keys = [key if at % 7 == 3 else None for at in range(600)]
    event = stored([*range(600)], [7] * 9_600, extra_keys=keys)
    batch = in_pieces(encode_batch([event]), "map", bigram=False, values=100)
    assert batch is not None
    (read,) = batch.events
    assert isinstance(read, BlockStored)
    assert isinstance(read.mm_hashes, PackedLists | None)
    assert isinstance(read.opaque, PackedBytes | None)
    says_the_same(encode_batch([event]), "map", 100, bigram=False)


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("bigram", [False, True])
def test_pairs_of_a_long_event_are_told_from_what_is_malformed(form: str, bigram: bool) -> None:
    tokens: list[Any] = [7] * 9_600 if bigram else [[7, 8]] * 9_600
    event = encode_event(stored([*range(600)], tokens), f"{form}-int")
    batch = in_pieces(encode_batch([event]), form, bigram=bigram, values=100)
    assert batch is not None
    assert [*batch.events] == [BadEvent("eagle_mismatch")]
    says_the_same(encode_batch([event]), form, 100, bigram=bigram)
    torn = encode_event(stored([*range(600)], [*tokens[:-1], "x"]), f"{form}-int")
    batch = in_pieces(encode_batch([torn]), form, bigram=bigram, values=100)
    assert batch is not None
    assert [*batch.events] == [BadEvent("malformed")]


def test_a_part_is_small_whatever_the_message_says() -> None:
    """No decoder ever gets more at once than a piece, or what is a single value of a block."""
    events: list[dict[str, Any]] = [
        stored([*range(900)], [70_000] * 14_400, cache_salt="s"),
        removed([*range(5_000)]),
        *[removed([at], medium="gpu") for at in range(3_000)],
        stored(
            [*range(900)], [1] * 14_400, extra_keys=[[["f" * 64, 0]]] * 900, later=[[1]] * 9_999
        ),
    ]
    payload = encode_batch(events)
    steps, reading = 0, PiecewiseDecoder(payload, "map", bigram=False, values=64)
    while not reading.go_on():
        steps += 1
    assert steps > len(payload) / 1_000
    says_the_same(payload, "map", 64, bigram=False)


@pytest.mark.parametrize("depth", [20, 300, 5_000])
def test_what_is_nested_deeply_is_no_more_than_it_was(depth: int) -> None:
    nested = b"\x91" * depth + b"\xc0"
    payload = b"\x94\x01\x91" + encode(removed([1])) + b"\xc0" + nested
    says_the_same(payload, "map", 7, bigram=False)


# -- walking ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", WALKERS)
@given(st.one_of(st.binary(max_size=40), SCRAPS.map(encode), damaged()), st.integers(1, 9))
def test_walking_in_steps_ends_where_the_value_does(by: Any, payload: bytes, fuel: int) -> None:
    try:
        msgspec.msgpack.decode(payload, type=msgspec.Raw)
    except ValueError:
        with pytest.raises(ValueError, match=r"MessagePack|neither|nested|more than"):
            ends_at(by, payload, fuel)
    else:
        assert ends_at(by, payload, fuel) == len(payload)


def ends_at(by: Any, payload: bytes, fuel: int) -> int:
    at, left = 0, [1]
    while left:
        at = by.walk(payload, at, left, fuel)
    if at != len(payload):
        raise ValueError("more than a value")
    return at
