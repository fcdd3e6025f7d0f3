from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.admission.worker import SimulatedWorker, WorkerSettings
from bench.admission.workload import Client

SETTINGS = WorkerSettings(
    step_s=1.0,
    prefill_token_s=0.01,
    sequence_s=0.1,
    step_tokens_max=100,
    sequences_max=2,
    kv_blocks=20,
)


def client(number: int, tokens: int, output_tokens: int) -> Client:
    return Client(number, "batch", "t", tokens, output_tokens, 0.0)


def run(worker: SimulatedWorker) -> list[tuple[float, int, str]]:
    happened: list[tuple[float, int, str]] = []
    while (at := worker.next_event) < math.inf:
        happened += [(round(at, 6), one.client.number, one.kind) for one in worker.step()]
    return happened


def test_a_prompt_is_computed_in_chunks_then_a_token_a_step() -> None:
    worker = SimulatedWorker(1, SETTINGS)
    worker.submit(client(1, 150, 3), 10.0)
    # 100 tokens: 2 s; 50 tokens: 1.5 s and the first output token; two more steps of 1.1 s.
    assert run(worker) == [(13.5, 1, "first_token"), (15.7, 1, "done")]


def test_a_full_block_of_output_is_reported_and_the_last_one_is_the_end() -> None:
    worker = SimulatedWorker(1, SETTINGS)
    worker.submit(client(1, 16, 33), 0.0)
    kinds = [kind for _, _, kind in run(worker)]
    assert kinds == ["first_token", "block", "block", "done"]


def test_who_decodes_takes_of_the_budget_and_slows_the_others() -> None:
    worker = SimulatedWorker(1, SETTINGS)
    worker.submit(client(1, 100, 5), 0.0)
    worker.submit(client(2, 100, 1), 0.5)
    happened = run(worker)
    # The second: 99 tokens beside one decoding sequence, then the last one.
    assert happened[0] == (2.0, 1, "first_token")
    first = 2.0 + (1.0 + 0.99 + 0.1) + (1.0 + 0.01 + 0.1)
    assert happened[1] == (round(first, 6), 2, "first_token")


@pytest.mark.parametrize("blocks", [20, 4])
def test_seats_and_blocks_limit_the_batch(blocks: int) -> None:
    worker = SimulatedWorker(1, WorkerSettings(sequences_max=2, kv_blocks=blocks))
    for number in range(3):
        worker.submit(client(number, 32, 32), 0.0)
    worker.step()
    assert worker.running == (2 if blocks == 20 else 1)
    assert len(worker.waiting) == 3 - worker.running


@given(st.lists(st.tuples(st.integers(1, 250), st.integers(1, 40), st.floats(0, 30)), max_size=20))
def test_everybody_gets_a_first_token_all_blocks_and_an_end(
    some: list[tuple[int, int, float]],
) -> None:
    worker = SimulatedWorker(1, SETTINGS)
    happened = []
    for number, (tokens, output, at) in enumerate(sorted(some, key=lambda one: one[2])):
        while worker.next_event <= at:
            happened += worker.step()
        worker.submit(client(number, tokens, output), at)
        assert worker.running <= SETTINGS.sequences_max
        assert worker.blocks_used <= SETTINGS.kv_blocks
    while worker.next_event < math.inf:
        happened += worker.step()
    for number, (_, output, _) in enumerate(sorted(some, key=lambda one: one[2])):
        kinds = [one.kind for one in happened if one.client.number == number]
        assert kinds == ["first_token", *["block"] * ((output - 1) // 16), "done"]
    assert worker.running == worker.blocks_used == len(worker.waiting) == 0
