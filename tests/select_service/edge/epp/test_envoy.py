"""A real Envoy asks the endpoint picker, and sends requests where that says."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from select_service.demo.engine import StepLimits
from select_service.demo.openai_engine import OpenAIEngine, prompt_of
from select_service.demo.worker import EngineShape
from select_service.types import OverlapScoresRequest
from tests.select_service.edge.epp.envoy import BY_HEADER, BY_METADATA, envoy
from tests.select_service.edge.epp.gateway import Gateway, gateway
from tests.select_service.gateway.stage import served
from tests.wait import PATIENCE_S, until

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

CHAT = "/v1/chat/completions"
QUICK = EngineShape(step_s=0.001, speed=StepLimits(decode_tokens_per_step=16))
SLOW = EngineShape(step_s=0.1, speed=StepLimits(decode_tokens_per_step=1))
RULES = {"role": "system", "content": "You are a patient teacher of history. " * 20}
ROME = {"role": "user", "content": "When did Rome fall?"}
WHO = {"role": "user", "content": "Who was Hypatia?"}
PREFIX = len(RULES["content"]) - 32
"""Tokens that the prompts share, less what may fill no block."""
DOWN = "the engine is down"
JSON = {"content-type": "application/json"}


@dataclass
class Stage:
    """An Envoy with a picker behind it, and engines behind both."""

    at: Gateway
    engines: list[OpenAIEngine]
    http: httpx.AsyncClient

    async def chat(self, *messages: Any) -> Any:
        body = {"messages": messages, "max_tokens": 8}
        return (await self.http.post(CHAT, json=body)).raise_for_status().json()

    def held(self, *messages: Any) -> dict[int, int]:
        """Blocks of a prompt by worker, as far as the index knows."""
        asked = OverlapScoresRequest(token_ids=prompt_of({"messages": messages}))
        scores = self.at.driver.overlap_scores(asked)
        return {row.worker_id: row.device_blocks for row in scores.workers}

    def booked(self) -> int:
        """Requests with a reservation."""
        return sum(requests for _, requests in self.at.loads().values())

    async def freed(self, **outcomes: int) -> None:
        """Wait until nothing is booked; all of it has ended like this."""
        await until(lambda: not self.booked(), self.at.loads)
        counted = self.at.driver.core.counters.outcomes
        assert {name: count for name, count in counted.items() if count} == outcomes


@contextlib.asynccontextmanager
async def stage(
    folder: Path,
    bodies: str = "FULL_DUPLEX_STREAMED",
    found: object = BY_METADATA,
    shape: EngineShape = QUICK,
) -> AsyncIterator[Stage]:
    engines = [OpenAIEngine(1, shape), OpenAIEngine(2, shape)]
    async with (
        gateway(epp_tokenize_timeout_s=PATIENCE_S) as at,
        served(engines[0].app) as one,
        served(engines[1].app) as two,
        envoy(folder, at.picker.port, bodies=bodies, found=found) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        for engine, endpoint in zip(engines, (one, two), strict=True):
            at.driver.upsert_worker(engine.spec(endpoint))
        yield Stage(at, engines, http)


@pytest.mark.parametrize(
    ("bodies", "found"),
    [("FULL_DUPLEX_STREAMED", BY_METADATA), ("BUFFERED", BY_HEADER)],
    ids=["streamed", "buffered"],
)
async def test_requests_go_where_their_prefix_is(
    tmp_path: Path, bodies: str, found: object
) -> None:
    async with stage(tmp_path, bodies, found) as on:
        cold = await on.chat(RULES, ROME)
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        holder = int(cold["id"].split("-")[1])
        await until(lambda: on.held(RULES)[holder])
        for number in range(4):
            warm = await on.chat(RULES, WHO | {"name": str(number)})
            assert int(warm["id"].split("-")[1]) == holder
            assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > PREFIX
        await on.freed(completed=5)


async def test_answers_stream_and_callers_leave(tmp_path: Path) -> None:
    async with stage(tmp_path, shape=SLOW) as on:
        long = {"messages": [RULES], "stream": True, "max_tokens": 1_500}
        async with on.http.stream("POST", CHAT, json=long) as answer:
            lines = answer.aiter_lines()
            first = json.loads((await anext(lines)).removeprefix("data: "))
            assert first["choices"]
            assert on.booked() == 1
            ((prefill, _),) = (one for one in on.at.loads().values() if one[1])
            assert prefill == 0, "its first bytes complete the prefill"
        await on.freed(cancelled=1)


async def test_refusals_and_failures_reach_the_caller(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        refused = await on.http.post(CHAT, content=b"[]", headers=JSON)
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
        for engine in on.engines:
            engine.worker.up = False
        failed = await on.http.post(CHAT, json={"messages": [ROME]})
        assert (failed.status_code, failed.json()["error"]["message"]) == (503, DOWN)
        await on.freed(failed=1)
        for engine in on.engines:
            on.at.driver.delete_worker(engine.worker.worker_id)
        nobody = await on.http.post(CHAT, json={"messages": [ROME]})
        assert nobody.status_code == 503
        assert "retry-after" in nobody.headers
        assert sum(engine.requests for engine in on.engines) == 1
