"""A whole SGLang behind the service: what is foretold of each prompt, and what it finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import Recorder
from tests.engines.exchange import Flavor
from tests.engines.fleet import Fleet, running_fleet
from tests.engines.gateway_chats import chats_of_openais_client
from tests.engines.install_sglang import SGLANG
from tests.engines.sglang_engine import SglangConfig
from tests.engines.test_vllm import assert_foretold

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

ENVIRONMENT = SGLANG
REQUESTS = 150
SALTS = (Flavor(), Flavor(salt="one"), Flavor(salt="two"))


@pytest.fixture(scope="module", name="fleet")
def _fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = SglangConfig("llama")
    with running_fleet(tmp_path_factory.mktemp("sglang"), [config, config]) as fleet:
        yield fleet


def test_conversations(fleet: Fleet, recorder: Recorder) -> None:
    """Into trees that are too small for all of them; then with salts; then some are cancelled."""
    verdict = recorder(fleet.drive("sglang, evictions", REQUESTS))
    assert any(fleet.log.removed.values()), "the trees were large enough for everything"
    assert_foretold(verdict)
    assert_foretold(recorder(fleet.drive("sglang, salts", REQUESTS, flavors=SALTS, prefixes=2)))
    left = recorder(fleet.drive("sglang, callers that leave", REQUESTS, cancel_share=0.3, seed=2))
    assert_foretold(left)
    assert fleet.server.fleet_load() == (0, 0, 0)


def test_chats_of_openais_client(fleet: Fleet, tmp_path: Path) -> None:
    """Through the gateway's example, which tokenizes: SGLang knows no chat at /tokenize."""
    pytest.importorskip("transformers")
    chats_of_openais_client(tmp_path, fleet.engines, tokenizes_here=True)
