"""Canary prompts go through engines, and what their caches report is compared with our names."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from select_service import cli
from select_service.client import AsyncClient
from select_service.core.diagnostics import causes
from select_service.core.diagnostics.parity import (
    CanaryOutcome,
    canary_text,
    canary_tokens,
    judge,
)
from select_service.demo.engine import StepLimits
from select_service.demo.openai_engine import OpenAIEngine
from select_service.demo.worker import EngineShape
from select_service.doctor.canary import CanaryReport, send_canaries
from select_service.doctor.query import Answer
from select_service.edge.driver.driver import Driver
from select_service.types import WorkerSpec
from tests.live.ports import HOST, free_port
from tests.select_service.edge.serving import listening
from tests.select_service.gateway.stage import served
from tests.wait import PATIENCE_S

SHAPE = EngineShape(step_s=0.001, speed=StepLimits(decode_tokens_per_step=16))


class ColdEngine(OpenAIEngine):
    """Computes chats under another template than its /tokenize has."""

    prefix = b""

    def prompt(self, body: dict[str, Any]) -> list[int]:
        return [*(self.prefix if "messages" in body else b""), *super().prompt(body)]


@dataclass
class Ward:
    port: int
    driver: Driver
    client: AsyncClient
    engines: list[ColdEngine]
    urls: list[str]

    async def register(self, number: int = 0, **fields: Any) -> None:
        """Register an engine, with something wrong."""
        spec = self.engines[number].spec(self.urls[number])
        await self.client.upsert_worker(replace(spec, **fields))

    async def probe(self, events_s: float = PATIENCE_S) -> CanaryReport:
        answer: Answer = await self.client.call(
            "GET", "/ready?verbose=true", None, Answer, accepts=(503,)
        )
        return await send_canaries(self.client, answer.workers, PATIENCE_S, events_s)

    async def codes(self) -> list[str]:
        """What a probe finds that waits for nothing, and what the service itself finds after it."""
        found = (await self.probe(0.0)).findings
        doctor = self.driver.doctor()
        await doctor.examine()
        return [one.code for one in (*found, *(await doctor.report()).findings)]

    async def heals(self) -> None:
        report = await self.probe()
        assert (report.agree, report.findings) == (report.asked, [])


@contextlib.asynccontextmanager
async def ward(count: int = 1, **settings: Any) -> AsyncIterator[Ward]:
    engines = [ColdEngine(number + 1, SHAPE) for number in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        port, driver, _ = await stack.enter_async_context(listening(**settings))
        client = await stack.enter_async_context(AsyncClient(f"http://{HOST}:{port}"))
        urls = [await stack.enter_async_context(served(one.app)) for one in engines]
        yield Ward(port, driver, client, engines, urls)


@pytest.mark.e2e
async def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    async with ward() as at:
        await at.register()
        opaque = WorkerSpec(worker_id=2, endpoint="ray://opaque", block_size=16)
        opaque.kv_events_endpoint = f"tcp://{HOST}:{at.port}"  # somebody listens
        await at.client.upsert_worker(opaque)
        url = ("doctor", "--url", f"http://{HOST}:{at.port}", "--probe", "--timeout-s", "60")
        assert await asyncio.to_thread(cli.main, [*url, "--json"]) == 0
        output = json.loads(capsys.readouterr().out)
        assert output["findings"] == []
        assert output["canaries"] == {"ranks": 2, "asked": 1, "agree": 1}
        assert at.engines[0].requests == 3, "with tokens, with a salt, as a chat"
        at.engines[0].worker.up = False
        assert await asyncio.to_thread(cli.main, url) == 1
        out = capsys.readouterr().out
        assert "Canary prompts: 0 of 1 ranks report them as expected. 1 more have no" in out
        assert "canary-refused" in out
        at.engines[0].worker.up = True


async def test_an_engine_that_refuses() -> None:
    async with ward() as at:
        await at.register()
        at.engines[0].worker.up = False
        (finding,) = (await at.probe()).findings
        assert finding.code == "canary-refused"
        assert "503" in finding.what
        at.engines[0].worker.up = True
        await at.heals()


async def test_no_events() -> None:
    async with ward() as at:
        await at.register(kv_events_endpoint=f"tcp://{HOST}:{free_port()}")
        assert await at.codes() == ["canary-not-found"]
        await at.register()
        await at.heals()


@pytest.mark.parametrize(
    ("wrong", "code"),
    [({"block_size": 32}, "block-size-mismatch"), ({"is_eagle": True}, "eagle-mismatch")],
)
async def test_what_is_wrong_in_the_record_is_named(wrong: dict[str, Any], code: str) -> None:
    async with ward() as at:
        await at.register(**wrong)
        while (found := await at.codes()) != ["canary-not-found", code]:
            assert found == ["canary-not-found"], "events are on their way"
        await at.register()
        await at.heals()


async def test_another_template() -> None:
    async with ward() as at:
        await at.register()
        at.engines[0].prefix = b"<date>"
        report = await at.probe(1.0)
        while [one.code for one in report.findings] == ["canary-not-found"]:
            report = await at.probe(1.0)  # a busy machine
        assert [one.code for one in report.findings] == ["template-mismatch"]
        at.engines[0].prefix = b""
        await at.heals()


async def test_a_salt_that_is_lost_and_events_of_another() -> None:
    async with ward(2) as at:
        await at.register(0)
        at.engines[0].refused_fields = set()
        report = await at.probe(1.0)
        while [one.code for one in report.findings] == ["canary-not-found"]:
            report = await at.probe(1.0)
        assert [one.code for one in report.findings] == ["salt-mismatch"]
        at.engines[0].refused_fields = {"cache_salt"}
        for number in range(2):
            other = at.engines[1 - number].spec("")
            await at.register(
                number,
                kv_events_endpoint=other.kv_events_endpoint,
                replay_endpoint=other.replay_endpoint,
            )
        found = (await at.probe()).findings
        assert [one.code for one in found] == ["endpoint-shared"] * 2
        await at.register(0)
        await at.register(1)
        await at.heals()


async def test_a_service_that_probes_its_workers() -> None:
    async with ward(doctor_probe_workers=True) as at:
        watch = at.driver._canaries
        assert watch is not None
        await at.driver._stop_examining()  # its turns are ours
        codes: list[str] = []

        async def report() -> list[str]:
            found = await at.driver.doctor().report(examines=True)
            codes[:] = [one.code for one in found.findings]
            return codes

        await at.register(block_size=32)
        watch._canaries._events_s = 0.0
        await watch.turn()
        assert "canary-not-found" in await report()
        await watch.turn()
        sent = at.engines[0].requests
        assert sent == 4, "asked again later"
        await at.register()
        watch._canaries._events_s = PATIENCE_S
        await watch.turn()
        await watch.turn()
        assert at.engines[0].requests == sent + 3, "once: all is well"
        assert await report() == []
        await at.client.delete_worker(1)
        await watch.turn()
        assert not watch._due


OUTCOME = CanaryOutcome(
    model_name="m", tenant_id="t", worker_id=1, dp_rank=0, endpoint="http://w", kind="tokens"
)


@pytest.mark.parametrize(
    ("holders", "kind", "cause"),
    [
        ([(1, 0), (2, 0)], "tokens", None),
        ([(1, 1)], "tokens", causes.RANK_OFFSET),
        ([(2, 0)], "chat", causes.ENDPOINT_SHARED),
        ([], "tokens", causes.CANARY_NOT_FOUND),
        ([], "salt", causes.SALT_MISMATCH),
        ([], "chat", causes.TEMPLATE_MISMATCH),
    ],
)
def test_the_verdict(holders: Any, kind: Any, cause: causes.Cause | None) -> None:
    found = judge(replace(OUTCOME, holders=holders, kind=kind))
    assert (found and found[0]) == cause


@pytest.mark.parametrize("size", [1, 16, 256, 257, 4096])
def test_a_canary_has_a_whole_block_and_a_token_more(size: int) -> None:
    rng = Random(size)
    tokens = canary_tokens(size, rng)
    assert len(tokens) == 1 + max(32, size * (3 if size <= 256 else 1))
    assert set(tokens) <= {*range(3, 100)}
    assert len(canary_text(size, rng).split()) == len(tokens)
