"""What is shown of two policies is what their runs say, on fleets of one kind of engine or two."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bench.policy.unseen import Place, Task, done, rows_of, table_of

TASK = Task(shape="code", ground="", workers=2, load=0.8, policy="kv-cost", seed=1, requests=60)


@pytest.mark.parametrize("ground", ["", "every other at half speed", "failures and additions"])
def test_a_cell_is_the_change_of_every_seed(ground: str) -> None:
    tasks = [
        replace(TASK, ground=ground, seed=seed, policy=policy)
        for seed in (1, 2)
        for policy in ("kv-cost", "first-token")
    ]
    found = [done(one, {Place.of(one): 30.0}) for one in tasks]
    (row,) = rows_of(tasks, found)
    assert row.seeds == 2
    before, after = found[::2], found[1::2]
    assert [one.policy for one in before] == ["kv-cost"] * 2
    assert [one.requests for one in found] == [60] * 4
    changes = [b.ttft_s.p90 / a.ttft_s.p90 - 1 for a, b in zip(before, after, strict=True)]
    assert row.change["ttft_p90"].mean == pytest.approx(sum(changes) / 2)
    assert "code" in table_of([row])


def test_what_is_longer_beyond_its_interval_is_worse() -> None:
    place = Place.of(TASK)
    fast, slow = done(TASK, {place: 10.0}), done(TASK, {place: 60.0})
    tasks = [replace(TASK, seed=s, policy=p) for s in (1, 2) for p in ("kv-cost", "first-token")]
    (row,) = rows_of(tasks, [fast, slow, fast, slow])
    assert "ttft_mean" in row.worse
    assert "!" in table_of([row])
