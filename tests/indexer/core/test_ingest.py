"""The compiled way of events against its plain twin: same batches, same index, same books.

Whatever the bytes are, the reader says what `wire` says or leaves it to `wire`; whatever the
messages are, a stream that is fed the compiled way stands where one that is not would stand.
"""

from __future__ import annotations

import gc
from collections import deque
from random import Random
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from indexer.compiled import kernels_in_use
from indexer.core import removal, wire
from indexer.core.events import EventBatch
from indexer.core.index import KvIndex
from indexer.core.progress import END_MARKER
from indexer.core.registry import StreamRegistry
from indexer.core.stream import EventStream
from indexer.core.wire import BatchDecoder, decode_plain
from indexer.types import Scope, StreamLimits, WorkerRank
from tests.effort import examples, share_of
from tests.indexer.encoding import ARRAY_FIELDS, comparable, encode_batch, message, removed, stored

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


# -- the feeder ------------------------------------------------------------------------------------


class Engines:
    """Two ranks that cache prompts of few words, so that they share, part, lose and repeat."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.names: list[list[int]] = [[], []]
        self.told: list[list[dict[str, Any]]] = [[], []]
        # a rank whose blocks are offloaded, an engine that works with nothing else, most of them
        self.media = random.choice([["GPU"], ["GPU", "CPU"], ["CPU"], ["GPU"] * 12 + ["DISK"]])
        self.fresh = 1000

    def store(self, rank: int) -> dict[str, Any]:
        random, held = self.random, self.names[rank]
        count = random.choice([1, 1, 1, 2, 3, 9])
        if held and random.random() < 0.15:
            return self.again(rank)
        if held and random.random() < 0.1:
            names = [random.choice(held) for _ in range(count)]
        else:
            names = [*range(self.fresh, self.fresh + count)]
            self.fresh += count
        parent = None
        if held and random.random() < 0.85:
            parent = held[-1] if random.random() < 0.7 else random.choice(held)
        elif random.random() < 0.05:
            parent = random.randrange(900)
        tokens = [random.randrange(2) for _ in range(BLOCK_SIZE * count)]
        held.extend(names)
        event = stored(names, tokens, parent, block_size=BLOCK_SIZE)
        self.colour(event)
        if random.random() < 0.15:
            event |= random.choice(
                [
                    {"lora_name": "a", "lora_id": 1},
                    {"lora_name": "b"},
                    {"lora_id": 1},
                    {"block_size": 3},
                    {"extra_keys": [["s"]] + [None] * (count - 1)},
                    {"lora_name": "a", "extra_keys": [["a", "s"]] + [["a"]] * (count - 1)},
                    {"extra_keys": [None] * (count - 1) + [[[MEDIA, 3], [MEDIA[::-1], 1]]]},
                    {"extra_keys": [[b"opaque"]] * count},
                    {"extra_keys": [[MEDIA]] + [None] * (count - 1)},
                    {"extra_keys": [[[MEDIA, 0], MEDIA]] + [[[MEDIA, -4]]] * (count - 1)},
                    {"lora_name": MEDIA, "extra_keys": [[MEDIA, MEDIA]] + [[MEDIA]] * (count - 1)},
                ]
            )
        self.told[rank].append(event)
        return event

    def again(self, rank: int) -> dict[str, Any]:
        """What was told before, of the same medium or another, with its tokens or without."""
        random = self.random
        event = {**random.choice(self.told[rank][-9:])}
        if random.random() < 0.6:
            event["medium"] = random.choice(["CPU", "CPU_TIER1", "DISK"])
        if random.random() < 0.2:
            event |= {"parent_block_hash": None, "token_ids": [], "block_size": 0}
        self.names[rank].extend(event["block_hashes"])
        return event

    def colour(self, event: dict[str, Any]) -> None:
        random = self.random
        event["medium"] = random.choice(self.media * 12 + [None, "CPU", "DISK", "moon"])
        event["group_idx"] = random.choice([0] * 20 + [None, 1, 1, 2])
        if random.random() < 0.05:
            event["locality"] = random.choice(["LOCAL", "REMOTE"])
        if event["type"] == "BlockStored":
            kind = random.choice(["full_attention"] * 20 + [None, "sliding_window"])
            event["kv_cache_spec_kind"] = kind

    def remove(self, rank: int) -> dict[str, Any]:
        random, held = self.random, self.names[rank]
        count = min(len(held), random.choice([1, 1, 2, 5, 40]))
        if random.random() < 0.7:
            names = [held.pop() for _ in range(count)]
        elif random.random() < 0.5:
            at = random.randrange(len(held) - count + 1)
            names = held[at : at + count][:: random.choice([1, -1])]
            del held[at : at + count]
        else:
            names = [random.choice(held) for _ in range(count)]
        event = removed(names)
        self.colour(event)
        return event

    def batch(self, rank: int) -> list[dict[str, Any]]:
        random = self.random
        told = []
        for _ in range(random.choice([0, 1, 1, 1, 2, 6, 20])):
            if random.random() < 0.01:
                told.append({"type": "AllBlocksCleared"})
                self.names[rank].clear()
            else:
                told.append(self.store(rank) if random.random() < 0.65 else self.remove(rank))
        return told


def streams(*, compiled: bool, limits: StreamLimits) -> tuple[KvIndex, list[EventStream]]:
    registry = StreamRegistry(limits=limits)
    index = registry.open_index(SCOPE, BLOCK_SIZE)
    opened = [
        registry.open_stream(SCOPE, WorkerRank(7, rank), worker_ranks=range(2), has_replay=False)
        for rank in range(2)
    ]
    if not compiled:
        for stream in opened:
            stream._feeder = None
    return index, opened


def feed(stream: EventStream, messages: list[list[bytes]], now: float) -> None:
    inbox = deque([*frames] for frames in messages)
    while inbox or stream.is_busy:
        if stream.is_busy:
            stream.resume(now)
        else:
            stream.take(inbox, now)


def books(index: KvIndex, opened: list[EventStream]) -> Any:
    """Everything that tells two histories apart."""
    index.check()
    kept = []
    for stream in opened:
        stream.check()
        tallies, cursor = stream.tallies, stream.cursor
        holder = index._ranks[stream.rank]
        kept.append(
            (
                {name: getattr(tallies, name) for name in tallies.__slots__},
                (cursor.last, cursor.recent(99), cursor._floor),
                (stream.last_batch_ts, stream.last_event_at, stream.kv_state, stream.lost_batches),
                (stream.rank, dict(stream._writer.groups), stream._names),
                (holder.home, [*holder.blocks]),
                [None if counts is None else counts.copies for counts in holder.counts],
                sorted(holder.where),
            )
        )
    dumped = sorted(msgspec.json.encode(event) for event in index.dump())
    return kept, dumped, index.stats._replace(bytes=0)  # a dict is as large as it once was


SEEDS = st.integers(0, 1 << 32)
FORMS = st.sampled_from(["map-int", "array-int", "map-bytes"])


def stands_where_its_twin_stands(seed: int, form: str) -> None:
    random = Random(seed)
    engines = Engines(random)
    limits = StreamLimits(
        blocks_per_turn=random.choice([8, 64, 512]), orphan_blocks_max=random.choice([5, 65_536])
    )
    fast, slow = (streams(compiled=compiled, limits=limits) for compiled in (True, False))
    assert fast[1][0]._feeder is not None
    sequences = [0, 0]
    for step in range(30):
        rank = random.randrange(2)
        messages = []
        for _ in range(random.choice([1, 3, 10])):
            payload = encode_batch(
                engines.batch(rank), form, ts=float(step), rank=random.choice([rank] * 9 + [None])
            )
            if random.random() < 0.02:
                payload = payload[:-1]
            messages.append(message(sequences[rank], payload))
            sequences[rank] += random.choice([1] * 60 + [0, 2])
        if random.random() < 0.02:
            messages.append([b"", b"1"])
        for _, opened in (fast, slow):
            feed(opened[rank], messages, float(step))
        assert books(*fast) == books(*slow)
        budget = random.choice([0, 0, 0, 3, 1000])
        for index, _ in (fast, slow):
            index.sweep(budget)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("broken", ["remove", "store"])
def test_a_message_that_an_error_cut_short_is_lost(broken: str, *, compiled: bool) -> None:
    """Whichever way it was written: a stream that knows nothing of it would call itself whole."""
    _, (stream, _) = streams(compiled=compiled, limits=StreamLimits())
    events = [stored([1, 2], [1] * 8, block_size=BLOCK_SIZE)]
    feed(stream, [message(0, encode_batch(events))], 0.0)
    events = [removed([1, 2])] if broken == "remove" else [stored([3], [2] * 4, 1, block_size=4)]
    events.append(stored([4], [3] * 4, 2, block_size=BLOCK_SIZE))
    spots = {"remove": (removal, "uncover_listed"), "store": (KvIndex, "store")}
    with mock.patch.object(*spots[broken], side_effect=RuntimeError), pytest.raises(RuntimeError):
        feed(stream, [message(1, encode_batch(events))], 1.0)
    stream.on_fault()
    assert stream.lost_batches == stream.tallies.lost_batches == 1
    stream.on_fault()
    assert stream.lost_batches == 1, "it is told once"
    feed(stream, [message(2, encode_batch([removed([2])]))], 2.0)
    assert (stream.cursor.last, stream.lost_batches) == (2, 1)


@settings(max_examples=examples(12))
@given(SEEDS, FORMS)
@example(19693218, "map-int")  # grows on CPU alone, behind blocks on CPU alone
def test_a_stream_fed_the_compiled_way_stands_where_its_twin_stands(seed: int, form: str) -> None:
    stands_where_its_twin_stands(seed, form)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=share_of(1_000))
@given(SEEDS, FORMS)
def test_a_stream_fed_the_compiled_way_for_long(seed: int, form: str) -> None:
    stands_where_its_twin_stands(seed, form)


@pytest.mark.parametrize("medium", ["GPU", "CPU_TIER1"])
@pytest.mark.parametrize("count", [5, 70, 300])
def test_coloured_events_of_any_length_are_stored_as_their_twin_stores_them(
    count: int, medium: str
) -> None:
    """Long ones go in slices in Python, which says in its own way what it refuses."""
    names, tokens = [*range(1, count + 1)], [n % 3 for n in range(count * BLOCK_SIZE)]
    keys = [["a", [MEDIA, 0]] if n % 2 else ["a"] for n in range(count)]
    first: dict[str, Any] = {"lora_name": "a", "extra_keys": keys, "block_size": BLOCK_SIZE}
    after = {**first, "extra_keys": [["a", "s"], *keys[1:]], "medium": medium}
    events = [
        stored(names, tokens, None, **first),
        stored(names, tokens, None, **first | {"medium": medium}),
        stored([*names[:-1], names[0]], tokens, None, **first),  # a name twice
        stored([n + 1000 for n in names], tokens, None, **after),
        stored([n + 2000 for n in names], tokens, names[-1], **first | {"medium": medium}),
        stored([n + 2000 for n in names], tokens, names[-1], **first | {"lora_name": "b"}),
        stored([n + 3000 for n in names], tokens, 2000 + count, block_size=BLOCK_SIZE),
        stored([n + 4000 for n in names], tokens, names[2], **first),
        removed(names[::-1], medium=medium),
        removed(names[::2]),
        removed([n + 3000 for n in names]),
        removed([n + 4000 for n in reversed(names)]),
    ]
    fast, slow = (streams(compiled=compiled, limits=StreamLimits()) for compiled in (True, False))
    messages = [message(0, encode_batch([stored([9999], [7] * 4, None, block_size=4)]))]
    for seq, event in enumerate(events, 1):
        messages.append(message(seq, encode_batch([event])))
        for _, opened in (fast, slow):
            feed(opened[0], messages, float(seq))
        messages.clear()
        assert books(*fast) == books(*slow)


def test_the_number_behind_the_last_one_is_none() -> None:
    """It ends replays, and no number follows it: taken for one, it would be the last ever heard."""
    last = END_MARKER - 1
    for apart in (False, True):
        fast, slow = (streams(compiled=one, limits=StreamLimits()) for one in (True, False))
        told = [
            message(seq, encode_batch([stored([at], [at] * BLOCK_SIZE, block_size=BLOCK_SIZE)]))
            for at, seq in enumerate([last - 1, last, END_MARKER, END_MARKER, 0, 1], 1)
        ]
        for _, (stream, _) in (fast, slow):
            for some in [[one] for one in told] if apart else [told]:
                feed(stream, some, 1.0)
            assert stream.cursor.last == 1
            assert stream.tallies.restarts == 1
            assert stream.tallies.bad_messages == {"sequence": 2}
        assert books(*fast) == books(*slow)


def test_a_stream_at_rest_keeps_nothing_of_its_rank() -> None:
    """A rank that is cleared has millions of names to give back, and its stream may be silent."""
    index, (stream, _) = streams(compiled=True, limits=StreamLimits())
    told = [encode_batch([stored([n], [n] * 4, block_size=BLOCK_SIZE)]) for n in range(3)]
    feed(stream, [message(seq, payload) for seq, payload in enumerate(told)], 0.0)
    holder = index._ranks[stream.rank]
    assert len(holder.where) == 3
    for kept in (holder, holder.where, holder.runs, holder.blocks):
        assert stream._feeder not in gc.get_referrers(kept)
