from __future__ import annotations

from itertools import pairwise, takewhile
from pathlib import Path
from random import Random
from statistics import mean, pstdev

import pytest

import bench.admission.workload as module
from bench.admission.workload import Source, read_workload

GOLDEN = Path(__file__).parents[2] / "golden" / "admission"


def test_the_four_class_workload_is_the_field_s() -> None:
    ours = Path(module.__file__).with_name("four_class_workload.yaml")
    assert ours.read_bytes() == (GOLDEN / "four_class_workload.yaml").read_bytes()


@pytest.mark.parametrize("name", ["four-class", "abusive-tenant"])
def test_arrivals_come_at_the_rate_and_in_the_shares_of_the_file(name: str) -> None:
    workload = read_workload(name)
    clients = list(takewhile(lambda one: one.arrives_at < 600.0, workload.clients(50.0, 7)))
    assert len(clients) == pytest.approx(50.0 * 600.0, rel=0.1)
    assert [one.number for one in clients] == list(range(len(clients)))
    assert clients == sorted(clients, key=lambda one: one.arrives_at)
    for source in workload.sources:
        mine = [
            one
            for one in clients
            if (one.slo_class, one.tenant_id) == (source.slo_class, source.tenant_id)
        ]
        assert len(mine) / len(clients) == pytest.approx(source.share, rel=0.2)
        assert {(one.tokens, one.output_tokens) for one in mine} == {
            (source.tokens, source.output_tokens)
        }


def test_bursts_are_as_bursty_as_set() -> None:
    source = Source("batch", "t", 0.5, 1, 1, cv=3.0)
    arrivals = source.arrivals(20.0, Random(1))
    times = [next(arrivals) for _ in range(20_000)]
    gaps = [after - before for before, after in pairwise(times)]
    assert mean(gaps) == pytest.approx(0.1, rel=0.1)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(3.0, rel=0.1)


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(ValueError, match="known are abusive_tenant, decode_bound, four"):
        read_workload("none")
