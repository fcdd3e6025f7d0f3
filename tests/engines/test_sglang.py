"""A whole SGLang behind the service: what is foretold of each prompt, and what it finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conftest import Recorder
from tests.engines.exchange import Flavor
from tests.engines.fleet import running_fleet
from tests.engines.gateway_chats import chats_of_openais_client
from tests.engines.install_sglang import SGLANG
from tests.engines.sglang_engine import SglangConfig
from tests.engines.test_vllm import assert_foretold

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

ENVIRONMENT = SGLANG
REQUESTS = 150
SALTS = (Flavor(), Flavor(salt="one"), Flavor(salt="two"))


def test_conversations(tmp_path_factory: pytest.TempPathFactory, told: Recorder) -> None:
    """Into trees that are too small for all of them; then with salts; then some are cancelled."""
    config = SglangConfig("llama")
    with running_fleet(tmp_path_factory.mktemp("sglang"), [config, config]) as fleet:
        verdict = told(fleet.drive("sglang, evictions", REQUESTS))
        assert all(fleet.log.removed.values()), "the trees were large enough for everything"
        assert_foretold(verdict)
        assert_foretold(told(fleet.drive("sglang, salts", REQUESTS, flavors=SALTS, prefixes=2)))
        left = told(fleet.drive("sglang, callers that leave", REQUESTS, cancel_share=0.3, seed=2))
        assert_foretold(left)
        assert fleet.server.fleet_load() == (0, 0, 0)


def test_chats_of_openais_client(tmp_path: Path) -> None:
    """Through the gateway's example, which tokenizes: SGLang knows no chat at /tokenize."""
    pytest.importorskip("transformers")
    chats_of_openais_client(tmp_path, SglangConfig("llama"), tokenizes_here=True)
