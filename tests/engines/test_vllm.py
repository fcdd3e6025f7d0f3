"""A whole vLLM behind the service: what is foretold of each prompt, and what the engine finds.

Every model is sent the same kind of conversations: shared beginnings, several turns, four at a
time, into pools that are too small for all of them.
"""

from __future__ import annotations

import pytest

from tests.engines.conftest import Recorder
from tests.engines.fleet import running_fleet
from tests.engines.verdicts import Verdict
from tests.engines.vllm_engine import EngineConfig

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

REQUESTS = 200
SHARE_MIN = 0.99
CONFIGS = (
    EngineConfig("qwen2", block_size=128, blocks=80, hash_algorithm="xxhash"),
    EngineConfig("llama", block_size=64, blocks=150, chunked_prefill=False),
    EngineConfig("gemma3", block_size=16, hash_algorithm="sha256_cbor"),
    EngineConfig("granite_h", block_size=80, blocks=120, hash_algorithm="xxhash_cbor"),
    EngineConfig("mistral", block_size=16),
)


def assert_foretold(verdict: Verdict) -> None:
    """Nearly all, and what was not has a reason."""
    said = "\n".join([str(verdict), *verdict.differences])
    assert verdict.cached > 0, said
    assert verdict.share >= SHARE_MIN, said
    assert not verdict.unexplained, said


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model)
def test_conversations(
    config: EngineConfig, tmp_path_factory: pytest.TempPathFactory, recorder: Recorder
) -> None:
    with running_fleet(tmp_path_factory.mktemp(config.model), [config, config]) as fleet:
        verdict = recorder(fleet.drive("conversations", REQUESTS))
    assert_foretold(verdict)


def test_ranks_that_are_passed_on(
    tmp_path_factory: pytest.TempPathFactory, recorder: Recorder
) -> None:
    config = EngineConfig("llama", ranks=2)
    with running_fleet(tmp_path_factory.mktemp("ranks"), [config]) as fleet:
        verdict = recorder(fleet.drive("data parallel, rank given", REQUESTS, pass_rank=True))
    assert_foretold(verdict)
