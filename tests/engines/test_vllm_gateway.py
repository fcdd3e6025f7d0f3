"""`examples/gateway` with OpenAI's own client in front, and two whole vLLM processes behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.fleet import running_engines
from tests.engines.gateway_chats import chats_of_openais_client
from tests.engines.vllm_engine import EngineConfig

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]


def test_chats_of_openais_client(tmp_path: Path) -> None:
    """vLLM tokenizes chats itself."""
    with running_engines(tmp_path, [EngineConfig("llama", block_size=16)] * 2) as engines:
        chats_of_openais_client(tmp_path, engines, tokenizes_here=False)
