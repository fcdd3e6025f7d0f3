"""Long messages in pieces: read, looked at and written so, they say what they say as a whole."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.compiled import kernels_in_use
from indexer.core import wire, writer
from indexer.core.dialects import MAP
from indexer.core.wire import BatchDecoder, LongBatch, Reading, decode_plain
from indexer.types import StreamLimits
from tests.effort import examples
from tests.indexer.core.test_feeder import FORMS, SEEDS, Engines, books, feed, streams
from tests.indexer.core.test_ingest import BLOCK_SIZE, PAYLOADS
from tests.indexer.encoding import comparable, encode_batch, message, removed, stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.core.events import EventBatch
    from indexer.core.index import KvIndex
    from indexer.core.stream import EventStream

BLOCKS = 1_300
COMPILED = [
    False,
    pytest.param(
        True,
        marks=pytest.mark.skipif(
            not kernels_in_use().get("indexer._ingest"), reason="not built, or not wanted"
        ),
    ),
]


def in_pieces(values: int) -> ExitStack:
    """Every message is a long one and is read so many values at a time."""
    stack = ExitStack()
    for name, value in (
        ("READ_AT_ONCE_BYTES", 0),
        ("READ_VALUES", values),
        ("PIECE_VALUES", values),
        ("DIGESTED_BYTES", values),
    ):
        stack.enter_context(mock.patch.object(wire, name, value))
    return stack


@pytest.mark.skipif(LongBatch is None, reason="not built, or not wanted")
@given(PAYLOADS, st.sampled_from(["map", "array"]), st.integers(1, 9))
def test_read_in_pieces_is_read(payload: bytes, form: str, values: int) -> None:
    batch = LongBatch(payload)
    while not batch.go_on(values):
        pass
    read, whole = batch.result(), decode_plain(payload, form)
    if read is None or read.form == form:
        assert comparable(read) == comparable(whole)
    with pytest.raises(IndexError):
        batch[len(batch)]


def names_of(batch: EventBatch) -> list[int]:
    return [name for event in batch.events for name in getattr(event, "block_hashes", ())]


@given(PAYLOADS, st.integers(1, 9))
def test_the_decoder_says_the_same_of_what_it_read_ahead(payload: bytes, values: int) -> None:
    whole, pieces = BatchDecoder(), BatchDecoder()
    with in_pieces(values):
        while not pieces.read_ahead(payload):
            pass
        digest, read = pieces.digest(payload), pieces.decode(payload)
        pieces.let_go()
    assert digest == whole.digest(payload)
    expected = whole.decode(payload)
    assert (read is None) == (expected is None)
    assert pieces._form == whole._form
    if read is not None and expected is not None:
        assert (repr(read.ts), read.dp_rank) == (repr(expected.ts), expected.dp_rank)
        # removals in a row are one, or not
        assert names_of(read) == names_of(expected)


def test_only_this_very_payload_was_read() -> None:
    decoder = BatchDecoder()
    first, second = (encode_batch([stored([n], [n] * 16)]) for n in (1, 2))
    with in_pieces(1000):
        while not decoder.read_ahead(first):
            pass
        batch = decoder.decode(second)
    assert batch is not None
    assert [*batch.events[0].block_hashes] == [2]  # type: ignore[union-attr]


def test_without_room_for_all_there_could_be_it_is_read_all_the_same() -> None:
    payload = encode_batch([stored([1], [1] * 16)])
    with mock.patch.object(wire, "LongBatch", side_effect=MemoryError):
        reading = Reading(payload, MAP, bigram=False)
        while not reading.go_on():
            assert reading.batch is None
    assert comparable(reading.batch) == comparable(BatchDecoder().decode(payload))


@settings(max_examples=examples(12))
@given(SEEDS, FORMS, st.integers(1, 200))
def test_a_stream_that_reads_in_pieces_stands_where_its_twin_stands(
    seed: int, form: str, values: int
) -> None:
    random = Random(seed)
    engines = Engines(random)
    limits = StreamLimits(blocks_per_turn=random.choice([8, 512]))
    pieces, whole = (streams(compiled=False, limits=limits) for _ in range(2))
    sequences = [0, 0]
    for step in range(20):
        rank = random.randrange(2)
        messages = []
        for _ in range(random.choice([1, 3])):
            payload = encode_batch(engines.batch(rank), form, ts=float(step), rank=rank)
            messages.append(message(sequences[rank], payload))
            sequences[rank] += random.choice([1] * 20 + [0, 2])
        with in_pieces(values):
            feed(pieces[1][rank], messages, float(step))
        feed(whole[1][rank], messages, float(step))
        assert books(*pieces) == books(*whole)


def long_store(first: int, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    tokens = [(first * 31 + at) % 977 for at in range(BLOCK_SIZE * BLOCKS)]
    names = [*range(first, first + BLOCKS)]
    return stored(names, tokens, parent, block_size=BLOCK_SIZE, **fields)


def histories() -> Iterator[Any]:
    """What long events can say."""
    first, second = long_store(10_000), long_store(20_000, 10_000 + BLOCKS - 1)
    names = [*range(10_000, 10_000 + BLOCKS)]
    yield "chain", [[first], [second]]
    yield "again, and off once", [[first], [first], [removed(names)]]
    yield "backwards", [[first, second], [removed(names[::-1])]]
    yield "scattered", [[first, second], [removed(names[::3] + names[1::3])]]
    yield "late parent", [[second], [first]]
    yield "on another tier", [[first], [removed(names, medium="GPU")]]
    offload = stored(names, [], None, block_size=0, medium="CPU")
    yield "placeholder", [[first], [offload], [removed(names)]]
    yield "adapter", [[long_store(10_000, lora_name="a")], [second]]
    keys = [[f"salt{at}"] if at % 700 == 1 else None for at in range(BLOCKS)]
    yield "keys", [[long_store(10_000, extra_keys=keys)], [second]]
    media = [
        [{"hash": f"{at:016x}", "start_offset": 0}] if at % 5 == 0 else [] for at in range(BLOCKS)
    ]
    yield "media", [[long_store(10_000, mm_keys=media)], [second]]
    for blocks in (60, 100, 500):  # hashed at once, and in steps
        few = stored([*range(1, blocks + 1)], [7] * blocks * BLOCK_SIZE, block_size=BLOCK_SIZE)
        opaque = [[{"x": at}] if at % 3 else None for at in range(blocks)]
        few |= {"mm_keys": media[:blocks], "extra_keys": opaque}
        yield f"{blocks} blocks of many colours", [[few], [few], [removed([*range(9, blocks)])]]
        again = few | {"block_hashes": [1, *range(1, blocks)]}
        yield f"{blocks} blocks of many colours, one twice", [[again], [few]]
    for at in (3, 600, BLOCKS - 1):
        twice = long_store(10_000)
        twice["block_hashes"][at] = twice["block_hashes"][0]
        yield f"the first name again at {at}", [[twice], [second]]
        own = long_store(20_000, 20_000 + at)
        yield f"its own parent at {at}", [[own], [first]]
        big = long_store(10_000)
        big["token_ids"][at * BLOCK_SIZE] = 1 << 32
        yield f"a token too large at {at}", [[big], [second]]


HISTORIES = [pytest.param(told, id=name) for name, told in histories()]


def tell(stream: EventStream, told: list[list[dict[str, Any]]], form: str) -> None:
    for seq, events in enumerate(told):
        feed(stream, [message(seq, encode_batch(events, form))], 1.0)


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("told", HISTORIES)
@pytest.mark.parametrize("form", ["map-int", "array-int"])
def test_long_events_in_slices_are_what_they_are_as_a_whole(
    told: list[list[dict[str, Any]]], form: str, *, compiled: bool
) -> None:
    limits = StreamLimits()
    slices, whole = (
        streams(compiled=compiled, limits=limits),
        streams(compiled=False, limits=limits),
    )
    with in_pieces(1000):
        tell(slices[1][0], told, form)
    with mock.patch.object(writer, "SLICE_BLOCKS", 1 << 30):
        tell(whole[1][0], told, form)
    mine, theirs = books(*slices), books(*whole)
    refused = {"events_refused": 0, "nodes": 0, "unswept": 0}  # who refuses, and where edges end
    assert mine[0] == theirs[0]
    assert mine[2]._replace(**refused) == theirs[2]._replace(**refused)


def begun(stream: EventStream, payload: bytes) -> None:
    """A long message has come and is being read."""
    feed_nothing = [message(0, payload)]
    stream.hear(feed_nothing[0], 1.0)
    assert stream.is_busy
    assert stream.cursor.last is None, "not taken yet"


def test_a_message_behind_one_that_is_being_read_waits_for_it() -> None:
    index, (stream, _) = streams(compiled=False, limits=StreamLimits())
    with in_pieces(100):
        begun(stream, encode_batch([stored([1], [1] * 400, block_size=BLOCK_SIZE)] * 9))
        stream.hear(message(1, encode_batch([removed([1])])), 1.0)
        while stream.is_busy:
            stream.resume(1.0)
    assert (stream.cursor.last, stream.tallies.gaps) == (1, 0)
    index.check()


def test_closing_forgets_what_is_being_read() -> None:
    index, (stream, _) = streams(compiled=False, limits=StreamLimits())
    with in_pieces(10):
        begun(stream, encode_batch([stored([1], [1] * 4, block_size=BLOCK_SIZE)] * 9))
        stream.close()
        assert not stream.is_busy
        stream.resume(1.0)
    assert index.stats.blocks == 0


def test_an_error_while_reading_costs_that_message() -> None:
    _, (stream, _) = streams(compiled=False, limits=StreamLimits())
    with in_pieces(10):
        begun(stream, encode_batch([stored([1], [1] * 4, block_size=BLOCK_SIZE)] * 9))
        with (
            mock.patch.object(Reading, "go_on", side_effect=RuntimeError),
            pytest.raises(RuntimeError),
        ):
            stream.resume(1.0)
        stream.on_fault()
        assert not stream.is_busy
        feed(stream, [message(1, encode_batch([removed([1])]))], 2.0)
    assert stream.tallies.gaps == 1
    assert stream.lost_batches == 1


def behind_a_late_parent(compiled: bool, children: int) -> tuple[KvIndex, EventStream]:
    """Many wait for block 7, which has come; the first of them have their place."""
    limits = StreamLimits(blocks_per_turn=64)
    index, (stream, _) = streams(compiled=compiled, limits=limits)
    waiting = [
        stored([1_000 + at], [at + 1] * 4, 7, block_size=BLOCK_SIZE) for at in range(children)
    ]
    feed(stream, [message(0, encode_batch(waiting))], 1.0)
    assert index.stats.orphan_blocks == children
    late = [stored([7], [9_999] * 4, block_size=BLOCK_SIZE), removed([1_000])]
    stream.hear(message(1, encode_batch(late)), 1.0)
    stream.resume(1.0)
    return index, stream


@pytest.mark.parametrize("compiled", COMPILED)
def test_children_of_a_late_parent_find_their_place_in_steps(*, compiled: bool) -> None:
    index, stream = behind_a_late_parent(compiled, 1_000)
    left = []
    while stream.is_busy:
        index.check()
        left.append(index.stats.orphan_blocks)
        stream.resume(1.0)
    assert len(left) > 5
    assert left == sorted(left, reverse=True)
    index.check()
    assert (index.stats.orphan_blocks, index.stats.blocks) == (0, 1_000), "and one has left"


def test_a_rank_that_is_cleared_while_it_heals() -> None:
    index, stream = behind_a_late_parent(compiled=False, children=1_000)
    assert index.stats.orphan_blocks
    index.clear(stream.rank)
    while stream.is_busy:
        stream.resume(1.0)
    while index.sweep(100):
        pass
    index.check()
    assert index.stats.blocks == index.stats.orphan_blocks == 0


@pytest.mark.parametrize("told", ["removals", "colours"])
def test_what_takes_long_takes_turns(told: str) -> None:
    """A row of removals counts by its blocks, and a block of many colours as several."""
    _, (stream, _) = streams(compiled=False, limits=StreamLimits())
    if told == "removals":  # each of another medium than the one before, so that none is joined
        events = [removed([*range(400)], medium="GPU" if at % 2 else "CPU") for at in range(40)]
    else:
        events = [long_store(1, extra_keys=[[{"x": at}] for at in range(BLOCKS)])]
    stream.hear(message(0, encode_batch(events)), 1.0)
    turns = 0
    while stream.is_busy:
        stream.resume(1.0)
        turns += 1
    assert turns >= 20
