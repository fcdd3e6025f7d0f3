"""Steps of one engine, without clock or socket: text in, text in its events."""

from __future__ import annotations

import random

import pytest

from select_service.demo.encoding import RemovedBlocks, StoredBlocks
from select_service.demo.engine import DemoEngine, DemoJob, StepLimits, StepReport


def until_idle(engine: DemoEngine) -> list[StepReport]:
    reports = []
    while not engine.idle:
        reports.append(engine.step())
        engine.check()
    return reports


def test_a_job_is_prefilled_in_chunks_decoded_and_finished() -> None:
    engine = DemoEngine(16, 4, StepLimits(prefill_tokens_per_step=6, decode_tokens_per_step=1))
    engine.submit(DemoJob("a", range(10), range(100, 107)))
    first, second, *rest = until_idle(engine)
    assert first.prefilled == []
    assert second.prefilled == [("a", 0)]
    assert [report.blocks_filled for report in rest] == [["a"], [], [], [], ["a"], []]
    assert [report.finished for report in rest][-1] == ["a"]
    stored = [e for r in (first, second, *rest) for e in r.events if isinstance(e, StoredBlocks)]
    assert [token for event in stored for token in event.token_ids] == [
        *range(10),
        *range(100, 106),
    ]
    assert engine.match([*range(10), *range(100, 107)]) == 16 // 4
    assert (engine.running, engine.waiting) == (0, 0)


def test_a_prompt_that_is_cached_is_reused_but_for_its_last_token() -> None:
    engine = DemoEngine(16, 4)
    engine.submit(DemoJob("a", range(8), (1,)))
    until_idle(engine)
    engine.submit(DemoJob("b", range(8), (1,)))
    engine.submit(DemoJob("c", range(9), (1,)))
    prefilled = [one for report in until_idle(engine) for one in report.prefilled]
    assert sorted(prefilled) == [("b", 1), ("c", 2)]


def test_what_can_never_fit_is_refused_and_the_next_goes_on() -> None:
    engine = DemoEngine(2, 4)
    engine.submit(DemoJob("huge", range(100), (1,)))
    engine.submit(DemoJob("small", range(4), (1,)))
    report = engine.step()
    assert report.refused == ["huge"]
    assert report.finished == ["small"]
    assert engine.idle


@pytest.mark.parametrize("seed", range(5))
def test_its_events_show_what_it_holds(seed: int) -> None:
    """Whoever follows them knows, for every prompt, as much as the engine."""
    rng = random.Random(seed)
    engine = DemoEngine(24, 4, StepLimits(16, 2, 4), hash_seed=seed)
    held: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    texts: list[list[int]] = []
    ended = 0
    for number in range(60):
        text = [*rng.choice([[], *texts])[:12], *(rng.randrange(3) for _ in range(5))]
        texts.append(text)
        outputs = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
        engine.submit(DemoJob(str(number), text, outputs))
        for report in until_idle(engine) if number % 5 == 4 else [engine.step()]:
            ended += len(report.finished)
            for event in report.events:
                if isinstance(event, StoredBlocks):
                    parent = event.parent
                    assert parent is None or parent in held
                    for at, block in enumerate(event.hashes):
                        assert block not in held
                        held[block] = (parent, event.token_ids[4 * at : 4 * at + 4])
                        parent = block
                else:
                    assert isinstance(event, RemovedBlocks)
                    for block in event.hashes:
                        del held[block]
        assert engine.blocks_held == len(held)
        by_content = {content: block for block, content in held.items()}
        for text in texts:
            found, parent = 0, None
            while (parent, tuple(text[4 * found : 4 * found + 4])) in by_content:
                parent = by_content[parent, tuple(text[4 * found : 4 * found + 4])]
                found += 1
            assert engine.match(text) == found
    assert ended == 60
