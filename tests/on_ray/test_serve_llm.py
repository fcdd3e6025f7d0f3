"""Ray Serve LLM with two real vLLM engines: the example of deploy/docs/ray.md, on processors.

It runs in the environment that has both (`make test-ray-llm`).
"""

from __future__ import annotations

import random
import types
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.tiny_models import FIRST_WORD, VOCABULARY, write_model
from tests.engines.vllm_engine import ENVIRONMENT
from tests.live.ports import free_base
from tests.on_ray.cluster import Cluster, Selectors, kill_replicas, wait_until
from tests.readme import document

pytestmark = [pytest.mark.heavy, pytest.mark.e2e, pytest.mark.timeout(600)]

CONVERSATIONS = 12
TURNS = 3
OUTPUT = 16
EVENTS, REPLAYS = 10, 20
TINY = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "num_gpu_blocks_override": 600,
}
BESIDE = {
    "placement_group_config": {"bundles": [{"CPU": 0.2}]},
    "runtime_env": {"env_vars": dict(ENVIRONMENT)},
    "log_engine_metrics": False,
}


def program(model: Path, base: int) -> str:
    """The example with another model, on processors, at ports that are free."""
    text = document.ray_llm_program()
    for old, new in (
        ('"meta-llama/Llama-3.1-8B-Instruct"', repr(str(model))),
        ("engine_kwargs={", f"**{BESIDE!r}, engine_kwargs={{**{TINY!r}, "),
        ('"num_replicas": 2,', '"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.2},'),
        ("{5557 + rank}", f"{{{base + EVENTS} + rank}}"),
        ("{6557 + rank}", f"{{{base + REPLAYS} + rank}}"),
        ('"timeout_ms": 250.0', '"timeout_ms": 5000.0'),
        ('"num_cpus": 0.1}', '"num_cpus": 0.1, "host": "127.0.0.1"}'),
    ):
        assert old in text, old
        text = text.replace(old, new)
    return text


def test_the_example(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="no vLLM beside Ray here: make test-ray-llm")
    module = types.ModuleType("example")
    model = write_model(tmp_path, "llama")
    with free_base((*range(EVENTS, EVENTS + 8), *range(REPLAYS, REPLAYS + 8))) as base:
        exec(compile(program(model, base), "ray.md", "exec"), module.__dict__)
        selectors = Selectors(cluster, "select-service")
        wait_until(lambda: len(selectors.urls()) == 2, "both selectors are there")
        wait_until(lambda: len(workers(selectors)) == 2, "both replicas are registered")
        converse(cluster)
        wait_until(selectors.loads_are_zero, "what was booked is freed")
        wait_until(lambda: sum(row["samples"] for row in trust(selectors)), "hits are compared")
        rows = trust(selectors)
        assert not any(row["missing_share"] or row["prediction_error"] for row in rows), rows
        assert routed(selectors) >= CONVERSATIONS

        assert kill_replicas("llm", deployment(), 1) == 1
        converse(cluster, may_fail=True)
        wait_until(selectors.loads_are_zero, "what the dead replica had is freed")


def converse(cluster: Cluster, *, may_fail: bool = False) -> None:
    """Several turns each, with beginnings that are shared."""
    rng = random.Random(7)

    def words(count: int) -> list[int]:
        return [rng.randrange(FIRST_WORD, VOCABULARY) for _ in range(count)]

    beginnings = [words(300) for _ in range(4)]
    for number in range(CONVERSATIONS):
        prompt = list(beginnings[number % len(beginnings)])
        for _ in range(TURNS):
            prompt += words(40)
            answer = httpx.post(
                cluster.url("/llm/v1/completions"),
                json={
                    "model": "llama",
                    "prompt": prompt,
                    "max_tokens": OUTPUT,
                    "ignore_eos": True,
                    "return_token_ids": True,
                },
                timeout=60,
            )
            if may_fail and answer.status_code >= 500:
                break
            assert answer.status_code == 200, answer.text
            prompt += answer.json()["choices"][0]["token_ids"]


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


def deployment() -> str:
    from ray import serve

    (name,) = (one for one in serve.status().applications["llm"].deployments if "KvServer" in one)
    return str(name)


def get(url: str, path: str) -> Any:
    return httpx.get(f"{url}{path}").raise_for_status().json()
