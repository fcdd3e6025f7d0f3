"""Hostile and merely odd messages over ZMQ: nothing kills the listener, neighbours survive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stage import BLOCK_SIZE, Stage
from tests.live.engine import FakeEngine
from tests.live.ports import free_port

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "events" / "malformed.json").read_text("utf-8")
)
CASES = [pytest.param(case, id=case["name"]) for case in GOLDEN["cases"]]
CLEARING = {"cleared-array"}


def good_batch(number: int) -> tuple[list[int], list[Any]]:
    tokens = [90_000 + number] * BLOCK_SIZE
    event = {
        "type": "BlockStored",
        "block_hashes": [123_456_000 + number],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": BLOCK_SIZE,
    }
    return tokens, [0.0, [event], None]


@pytest.mark.e2e
@pytest.mark.parametrize("case", CASES)
def test_malformed(case: dict[str, Any], stage: Stage) -> None:
    tenant = stage.new_tenant()
    worker = 1_000_000 + int(tenant.rpartition("-")[2])
    tokens = {number: good_batch(number)[0] for number in (0, 2, 3)}
    with FakeEngine(free_port()) as engine:
        stage.register(worker, tenant, {0: engine.endpoint})
        engine.publish(0, good_batch(0)[1])
        engine.publish_raw([bytes.fromhex(frame) for frame in case["frames"]])
        engine.publish(2, good_batch(2)[1])
        engine.publish(3, good_batch(3)[1])
        stage.sync(tenant, worker, 0, engine, 4)

        def is_indexed(prompt: list[int]) -> bool:
            return stage.rows(tenant, {"token_ids": prompt})[worker, 0] == [1, 1, 1]

        kept = {2, 3} if case["name"] in CLEARING else {0, 2, 3}
        assert {n for n in tokens if is_indexed(tokens[n])} == kept
        if case["expect"] in {"skip_event", "accept"} and case["has_good_marker"]:
            assert is_indexed(GOLDEN["good_marker_tokens"])
        if case["expect"] == "drop_message":
            assert not is_indexed(GOLDEN["bad_block_tokens"])
        if case["bad_block_should_be_indexed"] is not None:
            wanted = case["bad_block_should_be_indexed"]
            if case["expect"] != "implementation_defined":
                assert is_indexed(GOLDEN["bad_block_tokens"]) is wanted
