"""The examples of deploy/docs/ray.md with Ray Serve LLM, on processors, and traffic for them."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from tests.engines.tiny_models import FIRST_WORD, VOCABULARY
from tests.engines.vllm_engine import ENVIRONMENT

CONVERSATIONS = 12
TURNS = 3
OUTPUT = 16
APP = "llm"
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


def run_example(text: str, model: Path, changes: Iterable[tuple[str, str]]) -> None:
    """Run an example with another model, on processors, and with other changes."""
    pytest.importorskip("vllm", reason="no vLLM beside Ray here: make test-ray-llm")
    for old, new in (
        ('"meta-llama/Llama-3.1-8B-Instruct"', repr(str(model))),
        ("engine_kwargs={", f"**{BESIDE!r}, engine_kwargs={{**{TINY!r}, "),
        ('"num_replicas": 2,', '"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.2},'),
        *changes,
    ):
        assert old in text, old
        text = text.replace(old, new)
    exec(compile(text, "ray.md", "exec"), types.ModuleType("example").__dict__)


def mend_ray() -> None:
    """Give Ray 2.60, which is made for vLLM 0.29, a function where that had it.

    Its ingress ends with ModuleNotFoundError otherwise (`kv_aware/vllm/tokenizer.py`).
    """
    vllm = pytest.importorskip("vllm", reason="no vLLM beside Ray here: make test-ray-llm")
    moved = Path(vllm.__file__).parent / "entrypoints" / "chat_utils.py"
    if not moved.exists():
        moved.write_text("from vllm.renderers.chat_utils import load_chat_template\n", "utf-8")


def converse(ask: Callable[[Sequence[int]], Sequence[int] | None]) -> None:
    """Several turns each, with beginnings that are shared; None for an answer ends one early."""
    rng = random.Random(7)
    beginnings = [words(rng, 300) for _ in range(4)]
    for number in range(CONVERSATIONS):
        prompt = list(beginnings[number % len(beginnings)])
        for _ in range(TURNS):
            prompt += words(rng, 40)
            answered = ask(prompt)
            if answered is None:
                break
            prompt += answered


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_WORD, VOCABULARY) for _ in range(count)]


def deployment(part: str) -> str:
    """Name of the deployment of the example with this in its name."""
    from ray import serve

    (name,) = (one for one in serve.status().applications[APP].deployments if part in one)
    return str(name)
