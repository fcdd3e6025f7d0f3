"""What is told of two policies is what their runs say, on fleets of one kind of engine or two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from bench.policy.unseen import Task, done, rows_of, told

if TYPE_CHECKING:
    from select_service.simulator.core.measures import Measures

TASK = Task(shape="code", ground="", workers=2, load=0.8, policy="kv-cost", seed=1, requests=60)


@pytest.mark.parametrize("ground", ["", "every other at half speed", "failures and additions"])
def test_a_cell_is_the_change_of_every_seed(ground: str) -> None:
    found: dict[str, Measures] = {}
    tasks = []
    for seed in (1, 2):
        for policy in ("kv-cost", "first-token"):
            task = replace(TASK, ground=ground, seed=seed, policy=policy)
            one = done(task, 30.0)
            tasks.append(task)
            found[one.key] = one.measures
    (row,) = rows_of(tasks, found)
    assert row.seeds == 2
    before = [found[one.key] for one in tasks if one.policy == "kv-cost"]
    after = [found[one.key] for one in tasks if one.policy == "first-token"]
    assert [one.requests for one in before] == [one.requests for one in after] == [60, 60]
    changes = [b.ttft_s.p90 / a.ttft_s.p90 - 1 for a, b in zip(before, after, strict=True)]
    assert row.change["ttft_p90"].mean == pytest.approx(sum(changes) / 2)
    assert "code" in told([row])
    (half,) = rows_of(tasks, {key: one for key, one in found.items() if "|2|60" not in key})
    assert half.seeds == 1


def test_what_is_longer_beyond_its_interval_is_worse() -> None:
    fast, slow = done(TASK, 10.0), done(TASK, 60.0)
    tasks = [replace(TASK, seed=seed) for seed in (1, 2)]
    found = {}
    for task in tasks:
        found[task.key] = fast.measures
        found[replace(task, policy="first-token").key] = slow.measures
    (row,) = rows_of(tasks, found)
    assert "ttft_mean" in row.worse
    assert "!" in told([row])
