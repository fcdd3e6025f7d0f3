"""Steps of one engine, without clock or socket."""

from __future__ import annotations

from select_service.demo.engine import Engine, EngineSpeed, Job, StepReport
from select_service.demo.pool import BlockPool, Stored


def until_idle(engine: Engine) -> list[StepReport]:
    reports = []
    while not engine.idle:
        reports.append(engine.step())
        engine.pool.check()
    return reports


def test_a_job_is_admitted_prefilled_in_chunks_decoded_and_finished() -> None:
    speed = EngineSpeed(prefill_tokens_per_step=6, decode_tokens_per_step=3)
    engine = Engine(BlockPool(16, 4), speed)
    engine.submit(Job("a", range(10), range(100, 107)))
    first, second, *rest = until_idle(engine)
    assert (first.admitted, first.prefilled) == ([("a", 0)], [])
    assert second.prefilled == ["a"]
    assert [report.blocks_filled for report in rest] == [["a"], ["a"], []]
    assert [report.finished for report in rest] == [[], [], ["a"]]
    stored = [e for r in (first, second, *rest) for e in r.events if isinstance(e, Stored)]
    assert sum(len(event.hashes) for event in stored) == 17 // 4
    assert engine.pool.blocks_in_use == 0


def test_the_budget_of_a_step_goes_by_order_of_arrival() -> None:
    engine = Engine(BlockPool(16, 4), EngineSpeed(prefill_tokens_per_step=8))
    engine.submit(Job("a", range(6), ()))
    engine.submit(Job("b", range(50, 60), ()))
    assert engine.step().prefilled == ["a"]
    assert engine.step().prefilled == ["b"]
    engine.step()
    assert engine.idle


def test_nobody_overtakes_a_job_that_lacks_room() -> None:
    engine = Engine(BlockPool(4, 4))
    engine.submit(Job("a", range(12), ()))
    engine.step()
    engine.submit(Job("b", range(50, 62), ()))
    engine.submit(Job("c", range(90, 92), ()))
    report = engine.step()  # decode frees "a" before admission
    assert [name for name, _ in report.admitted] == ["b", "c"]

    engine = Engine(BlockPool(4, 4), EngineSpeed(prefill_tokens_per_step=4))
    engine.submit(Job("a", range(12), ()))
    engine.step()
    engine.submit(Job("b", range(50, 62), ()))
    engine.submit(Job("c", range(90, 92), ()))
    assert engine.step().admitted == []
    assert (engine.running, engine.waiting) == (1, 2)


def test_running_max_holds() -> None:
    engine = Engine(BlockPool(64, 4), EngineSpeed(running_max=1))
    for name in "ab":
        engine.submit(Job(name, range(4), range(8)))
    engine.step()
    assert (engine.running, engine.waiting) == (1, 1)


def test_what_can_never_fit_is_refused_and_the_next_goes_on() -> None:
    engine = Engine(BlockPool(2, 4))
    engine.submit(Job("huge", range(100), ()))
    engine.submit(Job("small", range(4), ()))
    report = engine.step()
    assert report.refused == ["huge"]
    assert report.prefilled == ["small"]


def test_cancel_wherever_the_job_is() -> None:
    engine = Engine(BlockPool(4, 4), EngineSpeed(running_max=1))
    engine.submit(Job("a", range(4), range(4)))
    engine.submit(Job("b", range(4), ()))
    engine.submit(Job("c", range(4), ()))
    engine.step()
    assert engine.cancel("c")
    assert engine.cancel("b")
    assert engine.cancel("a")
    assert not engine.cancel("a")
    assert engine.idle
    engine.pool.check()
