"""`examples/gateway`: OpenAI's own client before simulated engines, warm hits and all."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib import import_module
from typing import Any

import httpx
import pytest

from select_service.client import AsyncClient
from select_service.demo.engine import StepLimits
from select_service.demo.openai_engine import OpenAIEngine, prompt_of
from select_service.demo.worker import EngineShape
from select_service.edge.driver.driver import Driver
from select_service.gateway import Gateway
from tests.live.ports import free_port
from tests.readme.document import README
from tests.select_service.edge.serving import HOST, listening
from tests.select_service.gateway.stage import PATIENT, served
from tests.wait import PATIENCE_S, until

MODEL = "simulated"
SHAPE = EngineShape(step_s=0.001, speed=StepLimits(decode_tokens_per_step=16))
RULES: Any = {"role": "system", "content": "You are a patient teacher of history. " * 20}
ROME: Any = {"role": "user", "content": [{"type": "text", "text": "When did Rome fall?"}]}
WHO: Any = {"role": "user", "content": "Who was Hypatia?"}


def requests(driver: Driver) -> int:
    return sum(row.active_requests for scope in driver.loads() for row in scope.loads)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "x"])
def test_a_port_that_is_none_is_a_usage_error(
    port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module: Any = import_module("examples.gateway.gateway")
    with pytest.raises(SystemExit, match="2"):
        module.main(["--port", port])
    assert f"--port: invalid port value: '{port}'" in capsys.readouterr().err


def test_ctrl_c_ends_it_without_a_traceback() -> None:
    file = str(README.parent / "examples/gateway/gateway.py")
    port = free_port()
    command = (sys.executable, file, "--port", str(port))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as gateway:
        assert gateway.stderr is not None
        assert any("Uvicorn running on" in line for line in gateway.stderr), "it has ended"
        httpx.get(f"http://{HOST}:{port}/nothing", timeout=PATIENCE_S)  # it says so before it runs
        gateway.send_signal(signal.SIGINT)
        _, errors = gateway.communicate(timeout=PATIENCE_S)
    assert (gateway.returncode, "Traceback" in errors) == (0, False), errors


@pytest.mark.heavy
@pytest.mark.e2e
async def test_the_client_of_openai() -> None:
    openai = pytest.importorskip("openai")
    module: Any = import_module("examples.gateway.gateway")
    engines = [OpenAIEngine(1, SHAPE), OpenAIEngine(2, SHAPE)]
    async with (
        listening() as (port, driver, _),
        AsyncClient(f"http://{HOST}:{port}") as client,
        served(engines[0].app) as one,
        served(engines[1].app) as two,
        served(module.application(Gateway(client, options=PATIENT))) as url,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=PATIENCE_S
        ) as api,
    ):
        for engine, endpoint in zip(engines, (one, two), strict=True):
            await client.upsert_worker(engine.spec(endpoint))
        assert [found.id async for found in api.models.list()] == [MODEL]

        cold = await api.chat.completions.create(model=MODEL, messages=[RULES, ROME])
        assert cold.usage.prompt_tokens_details.cached_tokens == 0
        assert len(cold.choices[0].message.content) == cold.usage.completion_tokens == 16
        holder = int(cold.id.split("-")[1])
        tokens = prompt_of({"messages": [RULES]})
        selecting = client.select
        while not (await selecting(token_ids=tokens)).overlap.longest_matched:
            pass  # events are on their way

        stream = await api.chat.completions.create(
            model=MODEL,
            messages=[RULES, WHO],
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=20,
        )
        chunks = [chunk async for chunk in stream]
        assert int(chunks[0].id.split("-")[1]) == holder, "where the instructions are"
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens > len(RULES["content"]) - 32
        assert sum(len(c.choices[0].delta.content) for c in chunks if c.choices) == 20

        plain = await api.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=3)
        assert len(plain.choices[0].text) == 3

        stream = await api.chat.completions.create(
            model=MODEL, messages=[RULES, ROME], stream=True, max_tokens=5_000
        )
        await anext(aiter(stream))
        assert requests(driver) == 1
        await stream.close()  # the client leaves
        await until(lambda: not requests(driver))

        engines[holder - 1].worker.up = False
        other = await api.chat.completions.create(model=MODEL, messages=[RULES, WHO])
        assert int(other.id.split("-")[1]) == 3 - holder, "the other one, at the second attempt"
        engines[2 - holder].worker.up = False
        with pytest.raises(openai.InternalServerError) as refused:
            await api.chat.completions.create(model=MODEL, messages=[WHO])
        assert refused.value.status_code == 503
        await client.flush()
        await until(lambda: not requests(driver))
        async with httpx.AsyncClient() as http:
            stats = (await http.get(f"{url}/stats")).json()
        assert stats["prompts"]["tokenized"] >= 4
        assert stats["left"] == 1
        for engine in engines:
            engine.worker.up = True
