"""Workers without KV events: what their records say, and the estimate that stands in."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from indexer.types import WorkerRank
from select_service.core.decisions.explain import ExplainedRecord
from select_service.types import (
    KvEventsDefault,
    Outcome,
    OverlapScoresRequest,
    PairSelection,
    RouterConfig,
    SelectAndReserveRequest,
    Selection,
)
from tests.select_service.core.decisions.doubted import Late, trust
from tests.select_service.core.replication.replica import acquainted, tell
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of

PROMPT = (1, 2, 3, 4)
NO_ENDPOINT: dict[str, Any] = {"kv_events_endpoint": None}


def blind(worker_id: int, fleet: Fleet, **record: Any) -> None:
    fleet.worker(worker_id, kv_events="predicted", **NO_ENDPOINT, **record)


def serve(
    fleet: Fleet, worker_id: int, *blocks: int, found: int | None = None, isl: int | None = None
) -> Selection:
    """Let a worker compute a prompt; return what was answered before."""
    answer = selection_of(fleet.take("r", *blocks, isl=isl, allowed_worker_ids=[worker_id]))
    fleet._did(fleet.core.reservations.prefill_complete("r", fleet.now, found))
    fleet.free("r")
    return answer


def matched(fleet: Fleet, worker_id: int, *blocks: int) -> int:
    request = OverlapScoresRequest(
        block_hashes=list(blocks), sequence_hashes=list(blocks), isl_tokens=16 * len(blocks)
    )
    rows = fleet.core.queries.overlap_scores(request).workers
    return next(row.device_blocks for row in rows if row.worker_id == worker_id)


@pytest.mark.parametrize(
    ("default", "said", "endpoint", "lifecycle", "listens"),
    [
        ("auto", None, True, "schedulable", True),
        ("auto", None, False, "schedulable", False),
        ("auto", "engine", False, "incomplete", False),
        ("engine", None, True, "schedulable", True),
        ("engine", None, False, "incomplete", False),
        ("engine", "predicted", False, "schedulable", False),
        ("engine", "predicted", True, "schedulable", False),
        ("engine", "none", False, "schedulable", False),
        ("predicted", None, True, "schedulable", True),
        ("predicted", None, False, "schedulable", False),
        ("predicted", "engine", False, "incomplete", False),
        ("none", None, True, "schedulable", False),
        ("none", "engine", True, "schedulable", True),
        ("none", "engine", False, "incomplete", False),
    ],
)
def test_the_record_says_where_blocks_are_known_from_and_otherwise_the_default(
    default: KvEventsDefault, said: str | None, *, endpoint: bool, lifecycle: str, listens: bool
) -> None:
    fleet = Fleet(RouterConfig(kv_events_default=default))
    facts: dict[str, Any] = {"kv_events": said, **({} if endpoint else NO_ENDPOINT)}
    record = fleet.worker(1, total_kv_blocks=64, **facts)
    assert record.lifecycle == lifecycle
    assert bool(fleet.core.membership.streams()) is listens
    unsized = fleet.worker(2, **facts)  # a spec that says so little needs more, as in the contract
    is_contract = default == "auto" and not endpoint
    assert unsized.lifecycle == ("incomplete" if is_contract else lifecycle)
    switched_off = Fleet(RouterConfig(use_kv_events=False))
    assert switched_off.worker(1, **NO_ENDPOINT).lifecycle == "schedulable"


def test_what_a_rank_has_computed_is_matched_on_it_and_nowhere_else() -> None:
    fleet = Fleet()
    for worker_id in (1, 2):
        blind(worker_id, fleet)
    assert serve(fleet, 1, *PROMPT).overlap.gpu == 0
    assert (matched(fleet, 1, *PROMPT, 5), matched(fleet, 2, *PROMPT, 5)) == (4, 0)
    answer = selection_of(fleet.take("next", *PROMPT, 5))
    assert (answer.worker_id, answer.overlap.gpu, answer.effective_prefill_tokens) == (1, 64, 16)


def test_prompts_count_from_their_completion_or_the_end_of_their_request() -> None:
    fleet = Fleet()
    blind(1, fleet)
    fleet.take("r", *PROMPT)
    assert matched(fleet, 1, *PROMPT) == 0
    fleet.free("r")
    assert matched(fleet, 1, *PROMPT) == 4
    fleet.book("given up", 1, 7, 8)
    fleet.tick(1e6)
    assert matched(fleet, 1, 7, 8) == 0


def test_an_engine_that_found_less_or_more_corrects_the_estimate() -> None:
    fleet = Fleet()
    blind(1, fleet)
    serve(fleet, 1, *PROMPT, 5, isl=16 * 5 + 1)
    fleet.now += 1.0
    serve(fleet, 1, *PROMPT, 6, isl=16 * 5 + 1, found=32)
    assert matched(fleet, 1, *PROMPT, 6) == 5, "it has been computed since"
    assert matched(fleet, 1, *PROMPT, 5) == 4, "what others had behind that has gone"
    fleet.now += 1.0
    fleet.take("r", 9, 8, 7)
    fleet.core.cached_tokens.report("r", 16, fleet.now)
    assert matched(fleet, 1, 9, 8, 7) == 1, "it has more than it was given by us"


def test_an_estimate_ends_with_its_rank_and_with_its_kind() -> None:
    fleet = Fleet()
    blind(1, fleet)
    serve(fleet, 1, *PROMPT)
    blind(1, fleet, taints=["changed"])
    assert matched(fleet, 1, *PROMPT) == 4
    fleet.patch(1, kv_events="none")
    fleet.patch(1, kv_events="predicted")
    assert matched(fleet, 1, *PROMPT) == 0
    serve(fleet, 1, *PROMPT)
    fleet.delete(1)
    blind(1, fleet)
    assert matched(fleet, 1, *PROMPT) == 0
    fleet.tick(1.0)


def test_the_longer_of_what_events_and_estimate_say_counts() -> None:
    """A worker that sent events before keeps no blocks of theirs; a mixed fleet has both."""
    fleet = Fleet()
    fleet.worker(1)
    blind(2, fleet)
    fleet.hold(1, [1, 2, 3])
    serve(fleet, 2, 1, 2)
    assert (matched(fleet, 1, *PROMPT), matched(fleet, 2, *PROMPT)) == (3, 2)
    assert selection_of(fleet.select(*PROMPT)).worker_id == 1


def test_replicas_share_what_their_reservations_have_brought() -> None:
    here, there = acquainted()
    for one in (here, there):
        blind(3, one)
    for name, blocks in (("completed", PROMPT), ("only freed", (7, 8, 9))):
        here.take(name, *blocks, allowed_worker_ids=[3])
        tell(here, there)
        if name == "completed":
            here.done(name)
            tell(here, there)
        here.free(name)
        tell(here, there)
        assert matched(there, 3, *blocks) == matched(here, 3, *blocks) == len(blocks)


def test_both_ranks_of_a_pair_have_its_prompt() -> None:
    fleet = Fleet()
    blind(1, fleet, role="prefill")
    blind(2, fleet, role="decode")
    pair = fleet.pair("p", *PROMPT)
    assert isinstance(pair, PairSelection)
    fleet.done("p")
    assert [matched(fleet, worker_id, *PROMPT) for worker_id in (1, 2)] == [4, 4]
    again = fleet.pair("again", *PROMPT)
    assert isinstance(again, PairSelection)
    assert again.prefill is None or again.prefill.overlap_estimated is True
    assert again.decode.overlap_estimated is True


def test_prompts_that_share_nothing_by_decree_are_not_estimated_to() -> None:
    fleet = Fleet(RouterConfig(assume_kv_reuse=False))
    blind(1, fleet)
    for name in ("one", "two"):
        request = SelectAndReserveRequest(reservation_id=name, token_ids=list(range(64)))
        answer, _ = fleet.core.selection.select_and_reserve(request, fleet.now)
        assert selection_of(answer).overlap.gpu == 0
        fleet.free(name)


# -- what is estimated says so ---------------------------------------------------------------------


def test_whatever_an_estimate_has_matched_says_so() -> None:
    fleet = Fleet()
    fleet.worker(1)
    blind(2, fleet)
    serve(fleet, 2, *PROMPT)
    fleet.tick(1.0)
    said = [
        selection_of(fleet.select(*PROMPT, allowed_worker_ids=[worker_id])) for worker_id in (1, 2)
    ]
    assert [one.overlap_estimated for one in said] == [UNSET, True]
    record = next(fleet.core.decisions.newest_first())
    candidates = ExplainedRecord(record, 0.0, 0.1).candidates(0, 2)
    marks = [one.index and (one.index.state, one.index.estimated) for one in candidates]
    assert marks == [("silent", UNSET), ("none", True)]
    request = OverlapScoresRequest(block_hashes=[8], sequence_hashes=[8], isl_tokens=16)
    rows = fleet.core.queries.overlap_scores(request).workers
    assert [row.estimated for row in rows] == [UNSET, True]
    assert [trust(fleet, worker_id).estimated for worker_id in (1, 2)] == [UNSET, True]
    assert fleet.core.partitions[DEFAULT].estimate.ranks == 1


# -- in place of events that are missing -----------------------------------------------------------


def test_an_engine_that_never_told_of_what_it_computed_is_estimated_until_it_does() -> None:
    fleet = Late()
    for _ in range(20):
        fleet.tick(1.0)
    assert not fleet.row.estimated, "there is nothing to report"
    serve(fleet, 1, *PROMPT)
    fleet.tick(5.0)
    assert (matched(fleet, 1, *PROMPT), fleet.row.estimated) == (0, UNSET)
    fleet.tick(1.0)
    fleet.tick(10.0)
    assert (matched(fleet, 1, *PROMPT), fleet.row.estimated) == (4, True)
    fleet.event(0.1)
    assert (matched(fleet, 1, *PROMPT), fleet.row.estimated) == (0, UNSET)


def test_the_estimate_can_be_switched_off() -> None:
    fleet = Late(estimate_after_s=0.0)
    fleet.tick(1.0)
    serve(fleet, 1, *PROMPT)
    for _ in range(20):
        fleet.tick(1.0)
    assert (matched(fleet, 1, *PROMPT), fleet.row.estimated) == (0, UNSET)


def test_an_engine_whose_publisher_is_lost_is_estimated() -> None:
    fleet = Late()
    fleet.event(0.1)
    fleet.stream.unreachable_since = fleet.now
    fleet.tick(1.0)
    serve(fleet, 1, *PROMPT)
    fleet.tick(5.0)
    assert matched(fleet, 1, *PROMPT) == 0
    fleet.tick(5.0)
    assert (matched(fleet, 1, *PROMPT), fleet.row.estimated) == (4, True)
    fleet.stream.unreachable_since = None
    fleet.tick(1.0)
    assert (matched(fleet, 1, *PROMPT), fleet.row.estimated) == (0, UNSET)


def test_an_engine_that_was_started_again_holds_nothing() -> None:
    """From its first word on, not from the next look at the freshness of events."""
    fleet = Late()
    fleet.event(0.1)
    fleet.stream.unreachable_since = fleet.now
    fleet.tick(1.0)
    serve(fleet, 1, *PROMPT)
    fleet.tick(10.0)
    assert matched(fleet, 1, *PROMPT) == 4
    fleet.core.partitions[DEFAULT].index.clear(fleet.stream.rank)
    assert matched(fleet, 1, *PROMPT) == 0


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
def test_a_prompt_that_was_not_computed_is_not_estimated_to_be(outcome: Outcome) -> None:
    fleet = Fleet()
    blind(1, fleet)
    fleet.take("r", *PROMPT)
    fleet.core.reservations.free("r", fleet.now, outcome=outcome)
    assert matched(fleet, 1, *PROMPT) == 0


def test_a_cache_that_is_empty_fills_again() -> None:
    fleet = Fleet()
    blind(1, fleet)
    for _ in range(2):
        serve(fleet, 1, *PROMPT)
        assert matched(fleet, 1, *PROMPT) == 4
        fleet.core.partitions[DEFAULT].index.clear(WorkerRank(1, 0))
        assert matched(fleet, 1, *PROMPT) == 0


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
def test_neither_is_that_of_a_pair(outcome: Outcome) -> None:
    fleet = Fleet()
    blind(1, fleet, role="prefill")
    blind(2, fleet, role="decode")
    assert isinstance(fleet.pair("p", *PROMPT), PairSelection)
    fleet.core.reservations.free("p", fleet.now, outcome=outcome)
    assert [matched(fleet, worker_id, *PROMPT) for worker_id in (1, 2)] == [0, 0]


def test_an_engine_whose_batches_are_awaited_is_estimated_and_its_estimate_counts_in_full() -> None:
    fleet = Late()
    fleet.event(0.1)
    fleet.event(0.1, seq=7)  # some are missing, and replayed ones do not come
    assert fleet.stream.is_replaying
    for _ in range(8):
        fleet.tick(1.0)
    fleet.hold(1, [1, 2, 3, 4, 5])
    serve(fleet, 1, 1, 2, 3)
    fleet.tick(20.0)
    assert 0.0 < fleet.row.trust < 0.5
    assert fleet.row.estimated is True
    answer = selection_of(fleet.select(1, 2, 3, 4, 5))
    assert (answer.overlap.gpu, answer.effective_prefill_tokens) == (48, 32)
    assert matched(fleet, 1, 1, 2, 3) == 3
