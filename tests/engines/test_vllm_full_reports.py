"""A whole vLLM whose requests all ask it to publish again what they find cached.

`kv_cache_report_mode: "full"` of vLLM's requests, and of the workers' records. Without the latter
an index counts more blocks than an engine has, and keeps what was evicted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.engines.conftest import Recorder
from tests.engines.fleet import Fleet, running_fleet
from tests.engines.test_vllm import REQUESTS, assert_foretold
from tests.engines.vllm_engine import EngineConfig

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

CONFIGS = (
    (EngineConfig("llama", full_reports=True), 2 * REQUESTS),
    # whose windows go before the blocks of full attention do: prompts are computed a second time
    (EngineConfig("gemma3", full_reports=True), REQUESTS),
)


def blocks_of_workers(fleet: Fleet) -> Counter[int]:
    """Blocks on the device that the index has of each worker, by its dump."""
    dumped: Any = fleet.server.request("GET", "/dump").json
    counted: Counter[int] = Counter()
    for scope in dumped.values():
        for event in scope["events"]:
            stored = event["event"]["data"].get("stored", {})
            counted[event["worker_id"]] += len(stored.get("blocks", ()))
    return counted


@pytest.mark.timeout(900)  # evictions need many requests
@pytest.mark.parametrize(("config", "requests"), CONFIGS, ids=["llama", "gemma3"])
def test_full_reports(
    config: EngineConfig,
    requests: int,
    tmp_path_factory: pytest.TempPathFactory,
    recorder: Recorder,
) -> None:
    folder = tmp_path_factory.mktemp(config.model)
    with running_fleet(folder, [config, config]) as fleet:
        verdict = recorder(fleet.drive("full reports", requests))
        assert all(fleet.log.removed.values()), "the pools were large enough for everything"
        assert_foretold(verdict)
        for worker_id, blocks in blocks_of_workers(fleet).items():
            assert 0 < blocks < config.blocks, f"worker {worker_id} has no such room"
