"""Ray Serve LLM with two real vLLM engines: the example of deploy/docs/ray.md, on processors.

It runs in the environment that has both (`make test-ray-llm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.tiny_models import write_model
from tests.live.ports import free_base
from tests.on_ray import llm
from tests.on_ray.cluster import Cluster, Selectors, kill_replicas, wait_until
from tests.readme import document

pytestmark = [pytest.mark.heavy, pytest.mark.e2e, pytest.mark.timeout(1800)]

EVENTS, REPLAYS = 10, 20


def test_the_example(cluster: Cluster, tmp_path: Path) -> None:
    model = write_model(tmp_path, "llama")
    with free_base((*range(EVENTS, EVENTS + 8), *range(REPLAYS, REPLAYS + 8))) as base:
        changes = (
            ("{5557 + rank}", f"{{{base + EVENTS} + rank}}"),
            ("{6557 + rank}", f"{{{base + REPLAYS} + rank}}"),
            ('"timeout_ms": 250.0', '"timeout_ms": 5000.0'),
            ('"num_cpus": 0.1}', '"num_cpus": 0.1, "host": "127.0.0.1"}'),
        )
        llm.run_example(document.ray_llm_program(), model, changes)
        selectors = Selectors(cluster, "select-service")
        wait_until(lambda: len(selectors.urls()) == 2, "both selectors are there")
        wait_until(lambda: len(workers(selectors)) == 2, "both replicas are registered")
        converse(cluster)
        wait_until(selectors.loads_are_zero, "what was booked is freed")
        wait_until(lambda: sum(row["samples"] for row in trust(selectors)), "hits are compared")
        rows = trust(selectors)
        assert not any(row["missing_share"] or row["prediction_error"] for row in rows), rows
        assert routed(selectors) >= llm.CONVERSATIONS

        assert kill_replicas(llm.APP, llm.deployment("KvServer"), 1) == 1
        converse(cluster, may_fail=True)
        wait_until(selectors.loads_are_zero, "what the dead replica had is freed")


def converse(cluster: Cluster, *, may_fail: bool = False) -> None:
    def ask(prompt: Sequence[int]) -> Sequence[int] | None:
        answer = httpx.post(
            cluster.url("/llm/v1/completions"),
            json={
                "model": "llama",
                "prompt": prompt,
                "max_tokens": llm.OUTPUT,
                "ignore_eos": True,
                "return_token_ids": True,
            },
            timeout=60,
        )
        if may_fail and answer.status_code >= 500:
            return None
        assert answer.status_code == 200, answer.text
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids

    llm.converse(ask)


def workers(selectors: Selectors) -> list[Any]:
    return [
        one for one in get(selectors.urls()[0], "/workers") if one["lifecycle"] == "schedulable"
    ]


def routed(selectors: Selectors) -> int:
    """Selections of all selectors."""
    text = "\n".join(httpx.get(f"{url}/metrics").text for url in selectors.urls())
    lines = [
        line for line in text.splitlines() if line.startswith("select_service_selections_total")
    ]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


def trust(selectors: Selectors) -> list[Any]:
    """What each selector has compared, by replica."""
    return [row for url in selectors.urls() for row in get(url, "/trust")["ranks"]]


def get(url: str, path: str) -> Any:
    return httpx.get(f"{url}{path}").raise_for_status().json()
