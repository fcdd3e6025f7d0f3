from __future__ import annotations

import pytest

from bench.admission.measures import jain, max_min_shares, outcome_of
from bench.admission.workload import Client


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
