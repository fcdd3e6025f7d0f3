"""A selector crashes and comes back with its snapshot: what it credits is what its engine holds.

The real index and real streams against the dictionary of `engine_truth`, with two engines that
share contents. A snapshot is taken of one rank while events of the other go on; then the process
is gone, and the new one hears from each engine what came after the snapshot, and nothing else.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.core.checkpoint import CheckpointRun
from indexer.core.cursor import StreamMemory
from indexer.core.hashing import block_hashes
from indexer.core.index import KvIndex
from indexer.core.stream import EventStream
from indexer.types import Scope, WorkerRank
from tests.effort import examples
from tests.indexer.encoding import (
    CLEARED,
    encode_batch,
    end_marker,
    message,
    removed,
    reply,
    stored,
)
from tests.models.engine_truth import RankTruth

SIZE = 4
MEDIA = ["GPU", "GPU", "CPU", "DISK"]
GROUPS = [0, 0, 0, 1]

operations = st.tuples(
    st.integers(0, 1),  # whose
    st.sampled_from(["store", "store", "again", "remove", "remove", "clear"]),
    st.integers(0, 30),
    st.integers(1, 4),
    st.sampled_from(MEDIA),
    st.sampled_from(GROUPS),
)


class Engine:
    """One engine: the truth, and everything it ever published."""

    def __init__(self, number: int) -> None:
        self.rank = WorkerRank(number, 0)
        self.truth = RankTruth(SIZE)
        self.payloads: list[bytes] = []
        self._stores: list[dict[str, Any]] = []
        self._prefix: dict[int, list[int]] = {}

    def publish(self, kind: str, pick: int, blocks: int, medium: str, group: int) -> None:
        event = CLEARED
        if kind == "store" or not self._stores:
            event = self._store(pick, blocks, medium, group)
        elif kind == "again":
            event = self._stores[pick % len(self._stores)]
            parent = event["parent_block_hash"]
            if parent is not None and parent not in self._held():
                return  # no engine stores behind what it has not
        elif kind == "remove":
            names = [name for one in self._stores for name in one["block_hashes"]]
            event = removed([names[pick % len(names)]], medium=medium, group_idx=group)
        self.truth.apply([event])
        self.payloads.append(encode_batch([event], ts=float(len(self.payloads))))

    def _held(self) -> list[int]:
        return sorted({name for (_, _, name), count in self.truth.held.items() if count > 0})

    def _store(self, pick: int, blocks: int, medium: str, group: int) -> dict[str, Any]:
        parents: list[int | None] = [None, *self._held()]
        parent = parents[pick % len(parents)]
        first = 1 + 1000 * self.rank.worker_id + len(self._prefix)
        names = [first + at for at in range(blocks)]
        tokens = [pick % 3 + at for at in range(blocks * SIZE)]  # shared with the other engine
        before = [] if parent is None else self._prefix[parent]
        for at, name in enumerate(names, 1):
            self._prefix[name] = before + tokens[: at * SIZE]
        event = stored(
            names,
            tokens,
            parent,
            medium=medium,
            block_size=SIZE,
            group_idx=group,
            kv_cache_spec_kind="full_attention",
        )
        self._stores.append(event)
        return event

    def prompts(self) -> list[list[int]]:
        return [*self._prefix.values()]


class Selector:
    """One process: an index and a stream for each engine."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self.index = KvIndex(SIZE)
        self.streams = [
            EventStream(
                Scope("m", "t"), one.rank, self.index, worker_ranks=range(1), has_replay=True
            )
            for one in engines
        ]

    def hear(self, number: int) -> None:
        """Everything the engine has said since."""
        stream, payloads = self.streams[number], self.engines[number].payloads
        for seq in range(stream.cursor.expected, len(payloads)):
            stream.on_live(message(seq, payloads[seq]), 0.0)
            while stream.is_busy:
                stream.resume(0.0)

    def prove(self, number: int) -> None:
        """The engine answers the replay that was asked for."""
        stream = self.streams[number]
        request = stream.request
        assert request is not None
        assert request.start > 0 or stream.cursor.last == 0
        payloads = self.engines[number].payloads
        for seq in range(request.start, len(payloads)):
            stream.on_replay(reply(seq, payloads[seq]), 0.0)
        if stream.request is request:
            stream.on_replay(end_marker(), 0.0)
        while stream.is_busy:
            stream.resume(0.0)

    def check(self) -> None:
        self.index.check()
        prompts = [prompt for engine in self.engines for prompt in engine.prompts()]
        for prompt in prompts:
            rows = self.index.find_matches(block_hashes(prompt, SIZE)).rows()
            for engine in self.engines:
                slot = self.index.slot_of(engine.rank)
                assert slot is not None
                device, host, disk = rows.get(slot, (0, 0, 0))
                told = [device, device + host, device + host + disk]
                assert told == engine.truth.row({"token_ids": prompt})


Saved = tuple[int | None, StreamMemory, bytes]


def save(selector: Selector, number: int, between: Any) -> Saved | None:
    """Freeze a rank, with something happening to the other one between two nodes."""
    stream = selector.streams[number]
    if not stream.is_at_rest:
        return None
    runs = []
    for run in selector.index.freeze(stream.rank):
        runs.append(run)
        between()
    home = selector.index.holder(stream.rank).home
    return home, stream.memory(), msgspec.msgpack.encode(runs)


def load(selector: Selector, number: int, saved: Saved | None) -> None:
    if saved is None:
        return
    home, memory, runs = saved
    stream = selector.streams[number]
    thaw = selector.index.thaw(stream.rank, home)
    for run in msgspec.msgpack.decode(runs, type=list[CheckpointRun]):
        thaw.add(run)
        selector.index.check()
    stream.recall(memory, 0.0)


def come_back(selector: Selector, saved: list[Saved | None]) -> None:
    for number, one in enumerate(saved):
        load(selector, number, one)
    for number, one in enumerate(saved):
        if one is not None:
            assert selector.streams[number].is_unproven
            selector.prove(number)
            assert selector.streams[number].tallies.recalls == {"credited": 1}
        selector.hear(number)


@settings(max_examples=examples(200), deadline=None)
@given(
    early=st.lists(operations, max_size=40),
    during=st.lists(operations, max_size=20),
    late=st.lists(operations, max_size=25),
)
def test_credited_is_what_the_engine_holds(
    early: list[Any], during: list[Any], late: list[Any]
) -> None:
    engines = [Engine(0), Engine(1)]
    selector = Selector(engines)

    def happen(whose: int, *what: Any) -> None:
        engines[whose].publish(*what)
        selector.hear(whose)

    for operation in early:
        happen(*operation)
    selector.check()
    meanwhile = iter(during)

    def between(frozen: int) -> None:
        """Events of both engines; those of the rank that is being frozen wait."""
        operation = next(meanwhile, None)
        if operation is not None and operation[0] == frozen:
            engines[frozen].publish(*operation[1:])
        elif operation is not None:
            happen(*operation)

    saved = [save(selector, number, lambda number=number: between(number)) for number in (0, 1)]
    for whose, *what in late:
        engines[whose].publish(*what)

    other = Selector(engines)
    come_back(other, saved)
    other.check()
    while other.index.sweep(100):
        pass
    other.check()
