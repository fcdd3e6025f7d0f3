"""The simulated engine against a naive twin, and its promises one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.simulator.core.engine_settings import EngineSettings
from select_service.simulator.core.latency import AnalyticLatency
from select_service.simulator.core.worker import EngineJob, EngineWorker
from tests.select_service.simulator.core.engines import (
    BLOCK,
    SMALL,
    OneByOne,
    play,
    request,
    some,
)


def events_of(worker: EngineWorker) -> list[tuple[type, int]]:
    """What its events say, block by block."""
    return [(type(event), block) for event in worker.pool.events for block in event.blocks]


@given(seed=st.integers(0, 10**6), rate=st.sampled_from([1.0, 5.0, 50.0]))
def test_a_stretch_is_what_its_steps_are_one_by_one(seed: int, rate: float) -> None:
    requests = some(seed, 25, rate)
    quick, slow = EngineWorker(0, SMALL, BLOCK), OneByOne(0, SMALL, BLOCK)
    fast, naive = play(quick, requests), play(slow, requests)
    assert [one[1:] for one in fast] == [one[1:] for one in naive]
    assert [one[0] for one in fast] == pytest.approx([one[0] for one in naive], rel=1e-9)
    assert quick.steps == slow.steps
    assert quick.busy_s == pytest.approx(slow.busy_s)
    assert quick.pool.evictions == slow.pool.evictions
    assert events_of(quick) == events_of(slow)
    tokens = [sum(count for _, count in worker.gaps) for worker in (quick, slow)]
    assert tokens[0] == tokens[1]


@given(seed=st.integers(0, 10**6))
def test_every_request_has_one_first_token_and_one_end(seed: int) -> None:
    requests = some(seed, 30, 20.0)
    happened = play(EngineWorker(0, SMALL, BLOCK), requests)
    fits = {one.number for one in requests if -(-(one.isl + one.osl) // BLOCK) <= 40}
    ends = [number for _, kind, number in happened if kind == "done"]
    firsts = [number for _, kind, number in happened if kind == "first_token"]
    refused = [number for _, kind, number in happened if kind == "too_large"]
    assert sorted(ends) == sorted(firsts) == sorted(fits)
    assert sorted(refused) == sorted({one.number for one in requests} - fits)


def test_one_request_alone_takes_what_the_model_says() -> None:
    latency = AnalyticLatency(1e-2, 1e-3, 1e-6, 1e-3, 1e-5)
    worker = EngineWorker(0, replace(SMALL, step_tokens_max=1000), BLOCK)
    happened = play(worker, [request(0, 0.0, 20, 11)])
    prefill_s = latency.prefill_s(20, 0) + latency.stretch_s(0, 0, 1)
    assert [one[1] for one in happened] == ["first_token", "done"]
    ends_s = prefill_s + latency.stretch_s(1, 20, 10)
    assert [one[0] for one in happened] == pytest.approx([prefill_s, ends_s])


def test_long_prompts_are_computed_in_chunks_and_hold_nobody_up() -> None:
    worker = EngineWorker(0, SMALL, BLOCK)
    play(worker, [request(0, 0.0, 40, 1)])
    assert worker.steps == 3, "16 + 16 + 8 tokens"


def test_a_second_request_finds_what_the_first_has_left() -> None:
    worker = EngineWorker(0, SMALL, BLOCK)
    play(worker, [request(0, 0.0, 20, 5, first=0)])
    assert worker.prefill_tokens == 20
    play(worker, [request(1, 10.0, 20, 5, first=0)])
    assert worker.prefill_tokens == 24, "the last block is computed again: it has the last token"


def test_without_blocks_who_came_last_goes_back_and_comes_again() -> None:
    settings = EngineSettings(SMALL.latency, kv_tokens=40, step_tokens_max=64, sequences_max=4)
    worker = EngineWorker(0, settings, BLOCK)
    first, last = EngineJob(request(0, 0.0, 15, 20)), EngineJob(request(1, 0.0, 15, 20))
    worker.submit(first, 0.0)
    worker.submit(last, 0.0)
    ends = []
    while worker.due < float("inf"):
        now = worker.due
        ends += [one.job for one in worker.step(now) if one.kind == "done"]
        worker.check()
    assert ends == [first, last]
    assert (first.preemptions, last.preemptions) == (0, 1)
    assert last.generated == 20


def test_what_was_computed_elsewhere_only_decodes() -> None:
    worker = EngineWorker(0, SMALL, BLOCK, "decode")
    job = EngineJob(request(0, 0.0, 20, 5), prefilled=True)
    worker.submit(job, 1.0)
    assert worker.due == pytest.approx(1.0 + SMALL.latency.stretch_s(1, 20, 4))
    assert [one.kind for one in worker.step(worker.due)] == ["done"]
    assert worker.prefill_tokens == 0
    worker.check()


def test_a_killed_engine_holds_nothing() -> None:
    worker = EngineWorker(0, SMALL, BLOCK)
    for number in range(9):
        worker.submit(EngineJob(request(number, 0.0, 10, 10)), 0.0)
    worker.step(worker.due)
    assert worker.jobs == 9
    worker.kill()
    assert not worker.jobs
    worker.check()
    assert worker.pool.used == worker.pool.named == 0


@pytest.mark.parametrize("name", ["kv_tokens", "step_tokens_max", "sequences_max"])
def test_an_engine_that_cannot_compute_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        replace(SMALL, **{name: 0}).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("isl", range(28, 39))
def test_what_was_computed_elsewhere_is_let_in_if_it_can_ever_be(isl: int) -> None:
    """With its answer it fills the whole pool, and it is alone."""
    settings = EngineSettings(SMALL.latency, kv_tokens=40, step_tokens_max=64, sequences_max=4)
    worker = EngineWorker(0, settings, BLOCK, "decode")
    worker.submit(EngineJob(request(0, 0.0, isl, 40 - isl), prefilled=True), 0.0)
    worker.check()
    ended = []
    while worker.due < float("inf"):
        ended += worker.step(worker.due)
        worker.check()
    assert [one.kind for one in ended] == ["done"]


def test_what_a_prompt_has_computed_itself_is_not_found() -> None:
    """It goes back to the line in the middle of its prompt, and comes again to its own blocks."""
    settings = EngineSettings(SMALL.latency, kv_tokens=40, step_tokens_max=4, sequences_max=4)
    worker = EngineWorker(0, settings, BLOCK)
    first, last = EngineJob(request(0, 0.0, 8, 20)), EngineJob(request(1, 0.0, 28, 4))
    worker.submit(first, 0.0)
    worker.submit(last, 0.0)
    computed = 0
    while not last.preemptions:
        computed = last.computed
        worker.step(worker.due)
    assert computed > BLOCK
    assert not last.generated
    while worker.due < float("inf"):
        worker.step(worker.due)
        worker.check()
    assert worker.prefill_tokens < 8 + computed + 28, "the engine has found them"
    assert (first.cached, last.cached) == (0, 0)
