"""Every model with every block size, hash algorithm and way to compute prompts: by hand."""

from __future__ import annotations

import itertools

import pytest

from tests.engines.conftest import Recorder
from tests.engines.fleet import running_fleet
from tests.engines.test_vllm import assert_foretold
from tests.engines.vllm_engine import EngineConfig

pytestmark = [pytest.mark.heavy, pytest.mark.e2e, pytest.mark.long]

REQUESTS = 100
POOL_TOKENS = 9600
HASHES = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
PLAIN = [
    EngineConfig(
        "llama",
        block_size=size,
        hash_algorithm=algorithm,
        chunked_prefill=chunked,
        blocks=POOL_TOKENS // size,
    )
    for size, algorithm, chunked in itertools.product((16, 64, 128), HASHES, (True, False))
]
OTHERS = [
    EngineConfig(
        model, block_size=size, chunked_prefill=chunked, blocks=POOL_TOKENS // size * groups
    )
    for (model, groups), size, chunked in itertools.product(
        (("qwen2", 1), ("gemma3", 2), ("mistral", 1)), (16, 32, 64), (True, False)
    )
] + [
    # vLLM refuses to compute whole prompts where it keeps Mamba's states between blocks
    EngineConfig(model, block_size=size, blocks=120)
    for model, size in (
        *(("granite_h", 80), ("granite_h", 128), ("falcon_h1", 80)),
        *(("nemotron_h", 80), ("mamba2", 80)),
    )
]
OTHERS += [
    EngineConfig("gpt_oss", blocks=1200),
    EngineConfig("lfm2", blocks=400),
    EngineConfig("llama", draft_tokens=3),
    EngineConfig("llama", blocks=260),  # so few that answers under way must give theirs up
]


@pytest.mark.parametrize("config", [*PLAIN, *OTHERS], ids=lambda one: f"{one.model} {one}")
def test_conversations(
    config: EngineConfig, tmp_path_factory: pytest.TempPathFactory, recorder: Recorder
) -> None:
    with running_fleet(tmp_path_factory.mktemp(config.model), [config, config]) as fleet:
        verdict = recorder(fleet.drive("conversations", REQUESTS))
    assert_foretold(verdict)
