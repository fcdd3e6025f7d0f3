from __future__ import annotations

import pytest

from bench.admission.measures import jain, max_min_shares, measure, outcome_of
from bench.admission.play import Play, Script
from bench.admission.worker import WorkerSettings
from bench.admission.workload import Client, read_workload


def client(**became: object) -> Client:
    one = Client(1, "critical", "t", 512, 128, arrives_at=10.0)
    one.tries = 1
    for name, value in became.items():
        setattr(one, name, value)
    return one


@pytest.mark.parametrize(
    ("became", "outcome"),
    [
        ({"admitted_at": 10.1, "first_token_at": 12.0}, "in-time"),
        ({"admitted_at": 10.1, "first_token_at": 12.1}, "late"),
        ({"admitted_at": 10.1}, "unfinished"),
        ({}, "unfinished"),
        ({"refusals": ["a"], "returns_at": 99.0}, "refused:a"),
        ({"refusals": ["a"], "tries": 2}, "unfinished"),
        ({"refusals": ["a", "b"], "tries": 2}, "refused:b"),
        ({"refusals": ["a"], "tries": 2, "first_token_at": 11.9}, "in-time:returned"),
        ({"refusals": ["a"], "tries": 2, "first_token_at": 13.0}, "late:returned"),
        ({"failure": "500"}, "failed"),
    ],
)
def test_every_client_has_one_outcome(became: dict[str, object], outcome: str) -> None:
    assert outcome_of(client(**became)) == outcome


def test_jain() -> None:
    assert jain([3.0, 3.0, 3.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([]) == jain([0.0]) == 1.0


def test_fair_is_what_small_ones_ask_for_and_an_equal_part_for_the_others() -> None:
    assert max_min_shares([10.0, 100.0, 100.0], 90.0) == [10.0, 40.0, 40.0]
    assert max_min_shares([50.0, 1.0], 1000.0) == [50.0, 1.0]
    assert max_min_shares([], 1.0) == []


def test_what_a_tenant_takes_is_its_prompts_and_its_answers() -> None:
    settings = WorkerSettings(step_s=1.0, prefill_token_s=0.01, sequence_s=0.02, sequences_max=100)
    assert settings.work_s(100, 0) == pytest.approx(1.0)
    assert settings.work_s(0, 100) == pytest.approx(3.0), "with its part of the steps"
    script = Script(
        read_workload("mixed"), rate=1.0, seconds=10.0, warm_up_s=0.0, settings=settings
    )
    play = Play(script)
    for number in range(40):
        tokens, answer = (300, 0) if number % 2 else (0, 100)
        one = Client(number, "batch", "ab"[number % 2], tokens, answer, arrives_at=0.0)
        one.first_token_at = 0.0 if number < 20 else 1e3
        play.clients.append(one)
    jain_in_class = measure(play, []).jain_in_class
    assert jain_in_class["batch"] == pytest.approx(1.0), "as much work, whatever it is"
