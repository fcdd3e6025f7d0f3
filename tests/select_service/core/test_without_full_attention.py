"""Models without full attention, from the events of their engines to what is answered about them.

Requests are served as a client would serve them, so that which prompts fill their last block is
known; `test_sparse_prefixes.py` has the index alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from indexer.core.dump import DumpEvent
from indexer.core.dump_reader import DumpReader, ScopeOpened, load_event
from indexer.core.index import KvIndex
from indexer.core.stream import EventStream
from indexer.types import WorkerRank
from select_service.types import (
    OverlapScoresRequest,
    PotentialLoadsRequest,
    RankTrustRow,
    SelectAndReserveRequest,
)
from tests.indexer.core.test_cache_groups import SIZE, mamba, prompt_of, sliding
from tests.indexer.core.test_sparse_prefixes import RECORDED, told
from tests.indexer.encoding import encode_batch, message, removed
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of

RANK = WorkerRank(1, 0)


class Served(Fleet):
    """A worker whose engine publishes what it keeps, and callers that report what it found."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.size = size
        self.worker(1, block_size=size)
        self.seq = self.names = 0

    @property
    def stream(self) -> EventStream:
        stream = self.core.membership.stream_at(RANK)
        assert stream is not None
        return stream

    @property
    def index(self) -> KvIndex:
        return self.core.partitions[DEFAULT].index

    def publish(self, *events: dict[str, Any]) -> None:
        payload = encode_batch([*events], ts=float(self.seq))
        self.stream.on_live(message(self.seq, payload), self.now)
        while self.stream.is_busy:
            self.stream.resume(self.now)
        self.seq += 1
        self.core.check()

    def overlap(self, prompt: list[int]) -> int:
        """Tokens of a prompt that the rank is said to hold, on the device."""
        request = OverlapScoresRequest(token_ids=prompt)
        (row,) = self.core.queries.overlap_scores(request).workers
        return row.device_blocks * self.size

    def serve(self, prompt: list[int], cached_tokens: int) -> int:
        """Let the engine have a prompt, and report what it found of it; return the prediction."""
        self.names += 1
        name = f"r{self.names}"
        request = SelectAndReserveRequest(token_ids=prompt, reservation_id=name)
        answer, effects = self.core.selection.select_and_reserve(request, self.now)
        self._did(effects)
        self._did(self.core.reservations.prefill_complete(name, self.now, cached_tokens))
        self.free(name)
        return len(prompt) - selection_of(answer).effective_prefill_tokens

    def trust(self) -> RankTrustRow:
        (row,) = self.core.trust_monitor.table().ranks
        return row


@pytest.mark.parametrize("model", RECORDED, ids=lambda model: model["name"])
def test_what_is_answered_is_what_the_engine_has(model: Any) -> None:
    fleet = Served(model["block_size"])
    for step in model["steps"]:
        if "events" in step:
            fleet.publish(*step["events"])
            continue
        prompt, cached = step["prompt"], step["cached_tokens"]
        assert fleet.overlap(prompt) == cached
        loads = fleet.core.queries.potential_loads(PotentialLoadsRequest(token_ids=prompt))
        assert loads[0].potential_prefill_tokens == len(prompt) - cached
        assert fleet.serve(prompt, cached) == cached
    trust = fleet.trust()
    assert (trust.trust, trust.missing_share, trust.prediction_error) == (1.0, 0.0, 0.0)
    assert trust.samples > 0
    assert trust.index.known_share == 1.0


def by_dump(before: Served, after: Served) -> None:
    """A replica's recovery: the text of the dump, in pieces."""
    events = [msgspec.json.encode(event).decode() for event in before.index.dump() if event]
    scope = f'{{"block_size": {SIZE}, "events": [{",".join(events)}]}}'
    text = f'{{"default:default": {scope}}}'.encode()
    reader = DumpReader()
    found: list[ScopeOpened | bytes] = []
    for at in range(0, len(text), 50):
        found += reader.feed(text[at : at + 50])
    reader.finish()
    assert isinstance(found[0], ScopeOpened)
    for one in found[1:]:
        assert isinstance(one, bytes)
        load_event(after.index, msgspec.json.decode(one, type=DumpEvent))


def by_snapshot(before: Served, after: Served) -> None:
    """A warm start: what a checkpoint has of the index and of the stream."""
    thaw = after.index.thaw(RANK, before.index.holder(RANK).home)
    for run in before.index.freeze(RANK):
        thaw.add(run)
    after.stream.recall(before.stream.memory(), after.now)
    after.seq = before.seq


WINDOW, STATE = sliding(0, 9), mamba(0)


@pytest.mark.parametrize("travels", [by_dump, by_snapshot])
@pytest.mark.parametrize("spec", [WINDOW, STATE], ids=["sliding", "mamba"])
def test_what_travels_is_answered_and_goes_on(
    spec: dict[str, Any], travels: Callable[[Served, Served], None]
) -> None:
    before, after = Served(), Served()
    kept = [107, 108] if spec is WINDOW else [108]
    before.publish(told(kept, prompt_of(8), **spec), told([205], prompt_of(5, first=700), **spec))
    assert before.overlap(prompt_of(9)) == 8 * SIZE
    travels(before, after)
    kept = [109, 110] if spec is WINDOW else [110]
    go_on = told(kept, prompt_of(2, first=33), 108, **spec)
    held = {8: 8, 9: 9 if spec is WINDOW else 8, 10: 10}
    for fleet in (before, after):
        fleet.publish(go_on, removed([205], group_idx=0))
        for blocks, found in held.items():
            prompt = [*prompt_of(blocks), 1]
            assert fleet.overlap(prompt) == fleet.serve(prompt, found * SIZE) == found * SIZE
        assert fleet.overlap(prompt_of(8, first=700)) == 0
        trust = fleet.trust()
        assert (trust.trust, trust.missing_share, trust.samples) == (1.0, 0.0, 3)


def test_an_engine_that_has_lost_what_it_told_of_costs_trust() -> None:
    fleet = Served()
    fleet.publish(told([107, 108], prompt_of(8)))
    assert fleet.serve([*prompt_of(8), 1], 8 * SIZE) == 8 * SIZE
    for _ in range(40):
        fleet.serve(prompt_of(9), 0)
    trust = fleet.trust()
    assert trust.trust < 0.5
    assert trust.reasons == ["prediction"]
