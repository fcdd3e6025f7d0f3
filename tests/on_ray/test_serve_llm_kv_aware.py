"""Ray Serve LLM with two real vLLM engines, Ray's own KVAwareRouter, and ours in Dynamo's place.

It is the example of deploy/docs/ray.md, on processors. What Ray's ingress predicted is asked in its
process, and compared with what the engines say. Ray sends these requests by way of HAProxy, which
its wheels bring along; that is switched on before Ray is imported (`make test-ray-llm`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from select_service.errors import DecisionNotFound
from tests.engines.tiny_models import FIRST_WORD, write_model
from tests.live.ports import free_base
from tests.on_ray import llm
from tests.on_ray.cluster import Cluster, kill_replicas, replicas, wait_until
from tests.readme import document

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1",
        reason="Ray's KV-aware router needs its HAProxy: make test-ray-llm",
    ),
]

EVENTS, REPLAYS, TOKENS = 10, 1010, 20
"""Offsets of ports; Ray has each replica's replays 1,000 above its events."""
LONG = 3000
"""Tokens that take an engine longer than what is done while it answers."""


@dataclass
class Streams:
    """Requests as their caller sees them, by their number."""

    cluster: Cluster
    numbers: Iterator[int] = field(default_factory=count)
    cached_tokens: dict[str, int] = field(default_factory=dict)

    def ask(self, prompt: Sequence[int]) -> list[int]:
        """Send one and read its answer to the end."""
        name = f"r{next(self.numbers)}"
        tokens: list[int] = []
        pieces = 0
        with self.open(name, prompt, llm.OUTPUT) as stream:
            for piece in pieces_of(stream):
                for choice in piece["choices"]:
                    tokens += choice["token_ids"]
                    pieces += 1
                if (usage := piece.get("usage")) is not None:
                    details = usage["prompt_tokens_details"]
                    self.cached_tokens[name] = details["cached_tokens"] if details else 0
        assert len(tokens) == llm.OUTPUT
        assert pieces > 1, "the answer came in one piece"
        return tokens

    def are_routed(self) -> bool:
        """Whether the ingress is asked; Serve's own proxy takes what HAProxy has no place for."""
        self.cached_tokens.clear()
        self.ask([FIRST_WORD + next(self.numbers)])
        return bool(predictions(list(self.cached_tokens)))

    def open(
        self, name: str, prompt: Sequence[int], output: int
    ) -> contextlib.AbstractContextManager[httpx.Response]:
        """Send one; the tokens go as text, because Ray routes no numbers."""
        body = {
            "model": "llama",
            "prompt": " ".join(f"w{token}" for token in prompt),
            "max_tokens": output,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        url = self.cluster.url("/llm/v1/completions")
        headers = {"x-request-id": name}
        return httpx.stream("POST", url, json=body, headers=headers, timeout=60)


def pieces_of(stream: httpx.Response) -> Iterator[Any]:
    stream.raise_for_status()
    for line in stream.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_the_example_with_rays_router(cluster: Cluster, tmp_path: Path) -> None:
    llm.mend_ray()
    model = write_model(tmp_path, "llama")
    offsets = (*range(EVENTS, EVENTS + 4), *range(TOKENS, TOKENS + 4))
    with free_base((*offsets, *range(REPLAYS, REPLAYS + 4))) as base:
        ports = {"KV_EVENTS_PORT_BASE": base + EVENTS, "KV_TOKEN_PORT_BASE": base + TOKENS}
        configured = f"LLMConfig(experimental_configs={ports!r}, "
        changes = (("LLMConfig(\n", configured), (f"ray.init({hook()})", ""))
        llm.run_example(document.ray_kv_aware_program(), model, changes)
        wait_until(lambda: len(workers()) == 2, "both replicas are registered")
        streams = Streams(cluster)
        wait_until(streams.are_routed, "HAProxy asks the ingress")
        llm.converse(streams.ask)
        wait_until(nothing_is_left, "what was booked is freed")
        compare(streams)
        first = workers()

        names = ("dies", "given-up")
        rng = random.Random(8)
        with contextlib.ExitStack() as stack:
            under_way = [
                pieces_of(stack.enter_context(streams.open(name, llm.words(rng, 40), LONG)))
                for name in names
            ]
            for pieces in under_way:
                assert next(pieces)["choices"]
            assert {predictions([name])[name][0] for name in names} == first
            assert kill_replicas(llm.APP, llm.deployment("LLMServer"), 1) == 1
        wait_until(lambda: len(workers() & first) == 1, "the dead replica is forgotten")
        wait_until(nothing_is_left, "what it had is freed, and what its caller gave up")
        wait_until(streams.are_routed, "HAProxy has noticed the death")
        llm.converse(streams.ask)
        wait_until(nothing_is_left, "what was booked afterwards is freed")
        compare(streams)


def hook() -> str:
    """What conftest.py has set in Ray already."""
    return 'runtime_env={"worker_process_setup_hook": "select_service.compat.dynamo.install"}'


def compare(streams: Streams) -> None:
    """Every prediction is what its engine had, and most prompts had a beginning there."""
    cached = streams.cached_tokens
    predicted = {name: cached for name, (_, cached) in predictions(list(cached)).items()}
    assert predicted == cached
    assert sum(cached > 0 for cached in cached.values()) > len(cached) / 2


def in_ingress(look: Callable[[Any], Any]) -> Any:
    """Have a function called in the process of Ray's ingress, with its KV token tracker."""
    import ray

    def called(replica: object) -> Any:
        from ray.llm._internal.serve.routing_policies.kv_aware import kv_token_tracker

        tracker = kv_token_tracker.get_kv_token_tracker()
        return tracker and tracker._svc._now(lambda: look(tracker))

    (actor,) = replicas(llm.APP, "LLMRouter")
    return ray.get(actor.__ray_call__.remote(called))


def workers() -> set[int]:
    """Ids of those that can be chosen."""

    def look(tracker: Any) -> set[int]:
        found = tracker._svc._driver.workers(None, None)
        return {one.worker_id for one in found if one.lifecycle == "schedulable"}

    return in_ingress(look) or set()


def predictions(names: list[str]) -> dict[str, tuple[int, int]]:
    """Who was chosen for each request, and how many of its tokens counted as cached there."""

    def look(tracker: Any) -> dict[str, tuple[int, int]]:
        reports = tracker._svc._driver.decision_reports
        found = {}
        for name in names:
            try:
                reported = reports.explain(reports.find(name))
            except DecisionNotFound:
                continue
            chosen = reported.decision().chosen.worker_id
            (its,) = (
                one for one in reported.candidates(0, len(reported)) if one.worker_id == chosen
            )
            found[name] = chosen, its.cached_tokens
        return found

    found: dict[str, tuple[int, int]] = in_ingress(look)
    return found


def nothing_is_left() -> bool:
    """Whether nothing is booked here, and Ray's tracker holds nothing either."""

    def look(tracker: Any) -> bool:
        rows = [row for scope in tracker._svc.loads() for row in scope["loads"]]
        busy = [
            value
            for row in rows
            for name, value in row.items()
            if name not in ("worker_id", "dp_rank") and value
        ]
        return bool(rows) and not (busy or tracker._requests or tracker._request_ids_by_worker)

    return bool(in_ingress(look))
