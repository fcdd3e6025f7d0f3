"""Scripted event sequences and the rows they must lead to: against the twin, and over the wire."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.events import ENCODINGS
from tests.e2e.stage import BLOCK_SIZE, Stage
from tests.live.engine import FakeEngine
from tests.live.ports import free_port
from tests.models.engine_truth import RankTruth

GOLDEN = Path(__file__).parents[1] / "golden" / "events" / "tier_semantics.json"
CASES = [
    pytest.param(case, id=f"{case['group']}: {case['name']}")
    for case in json.loads(GOLDEN.read_text("utf-8"))["cases"]
]
NOTHING = [0, 0, 0]


@pytest.mark.parametrize("case", CASES)
def test_the_twin_agrees_with_the_golden_rows(case: dict[str, Any]) -> None:
    ranks: defaultdict[str, RankTruth] = defaultdict(lambda: RankTruth(BLOCK_SIZE))
    for step in case["steps"]:
        ranks[step["stream"]].apply(step["events"])
    for check in case["checks"]:
        for stream, truth in ranks.items():
            assert truth.row(check["query"]) == check["expect"].get(stream, NOTHING)


@pytest.mark.e2e
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("case", CASES)
def test_the_service_shows_the_golden_rows(
    case: dict[str, Any], encoding: str, stage: Stage
) -> None:
    encode = ENCODINGS[encoding]
    if encoding == "array" and any("locality" in e for s in case["steps"] for e in s["events"]):
        pytest.skip("no engine ever sent localities in arrays")
    streams = sorted({step["stream"] for step in case["steps"]})
    tenant = stage.new_tenant()
    with contextlib.ExitStack() as stack:
        engines = {s: stack.enter_context(FakeEngine(free_port())) for s in streams}
        worker_of = _register(stage, tenant, engines)
        sequence = dict.fromkeys(streams, 0)
        for step in case["steps"]:
            batch = [0.0, [encode(event) for event in step["events"]], None]
            engines[step["stream"]].publish(sequence[step["stream"]], batch)
            sequence[step["stream"]] += 1
        for stream in streams:
            worker, rank = worker_of[stream]
            stage.sync(tenant, worker, rank, engines[stream], sequence[stream])
        for check in case["checks"]:
            rows = stage.rows(tenant, check["query"])
            for stream in streams:
                assert rows[worker_of[stream]] == check["expect"].get(stream, NOTHING), stream


def _register(
    stage: Stage, tenant: str, engines: dict[str, FakeEngine]
) -> dict[str, tuple[int, int]]:
    """Register the workers behind streams "w/r"; worker ids are as in the case."""
    endpoints: defaultdict[int, dict[int, str]] = defaultdict(dict)
    first = int(tenant.rpartition("-")[2]) * 100
    worker_of = {}
    for stream, engine in engines.items():
        worker, rank = map(int, stream.split("/"))
        endpoints[first + worker][rank] = engine.endpoint
        worker_of[stream] = (first + worker, rank)
    for worker, ranks in endpoints.items():
        stage.register(worker, tenant, ranks)
    return worker_of
