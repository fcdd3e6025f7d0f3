"""A stream fed by the compiled reader stands where one stands that is fed by the plain one."""

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
from indexer.core import removal
from indexer.core.index import KvIndex
from indexer.core.progress import END_MARKER
from indexer.core.registry import StreamRegistry
from indexer.core.stream import EventStream
from indexer.types import StreamLimits, WorkerRank
from tests.effort import examples, share_of
from tests.indexer.core.test_ingest import BLOCK_SIZE, MEDIA, SCOPE
from tests.indexer.encoding import encode_batch, message, removed, stored

pytestmark = pytest.mark.skipif(
    not kernels_in_use().get("indexer._ingest"), reason="not built, or not wanted"
)


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
                (cursor.last, cursor.recent(99), cursor.heard),
                (stream.last_batch_ts, stream.last_event_at, stream.kv_state, stream.lost_batches),
                (stream.rank, dict(stream._writer.groups), stream._names),
                (holder.home, [*holder.blocks]),
                [None if counts is None else counts.copies for counts in holder.counts],
                sorted(holder.where),
            )
        )
    dumped = sorted(msgspec.json.encode(event) for event in filter(None, index.dump()))
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
