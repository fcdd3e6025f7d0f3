"""`examples/gateway` with OpenAI's own client in front, and two whole engines behind it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest

from select_service.client import AsyncClient
from select_service.gateway import Gateway, HuggingFaceTokenizer
from tests.engines.fleet import wait_until_ready
from tests.engines.tiny_models import FIRST_WORD, VOCABULARY
from tests.engines.vllm_engine import SERVED_NAME, VllmEngine
from tests.live.ports import HOST
from tests.live.server import OURS_EXTRA, Server
from tests.select_service.gateway.stage import PATIENT, served
from tests.wait import PATIENCE_S, run, until

CHATS, TURNS, OUTPUT = 6, 4, 20


def words(count: int, begin: int) -> str:
    spread = VOCABULARY - FIRST_WORD
    return " ".join(f"w{FIRST_WORD + (begin + 7 * one) % spread}" for one in range(count))


async def tokenized_by_engine(engine: VllmEngine, messages: list[Any]) -> Sequence[int]:
    """What vLLM makes of a chat."""
    body = {"model": SERVED_NAME, "messages": messages}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{engine.url}/tokenize", json=body, timeout=PATIENCE_S)
    tokens: list[int] = answer.raise_for_status().json()["tokens"]
    return tokens


def chats_of_openais_client(
    folder: Path, engines: Sequence[VllmEngine], *, tokenizes_here: bool
) -> None:
    """Every turn but the first is warm, and as warm as it was foretold."""
    openai = pytest.importorskip("openai")
    module: Any = import_module("examples.gateway.gateway")
    block_size = engines[0].config.block_size
    with Server(folder / "gateway-service.log", args=OURS_EXTRA) as server:
        for engine in engines:
            server.request("POST", "/workers", engine.worker(model_name=SERVED_NAME))
        wait_until_ready(server)
        encode = HuggingFaceTokenizer(str(engines[0].model)) if tokenizes_here else None

        async def chats() -> None:
            async with (
                AsyncClient(f"http://{HOST}:{server.port}") as client,
                served(
                    module.application(Gateway(client, tokenizer=encode, options=PATIENT))
                ) as url,
                openai.AsyncOpenAI(
                    base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=PATIENCE_S
                ) as api,
            ):
                assert [found.id async for found in api.models.list()] == [SERVED_NAME]
                for chat in range(CHATS):
                    messages: list[Any] = [{"role": "system", "content": words(200, chat)}]
                    for turn in range(TURNS):
                        messages.append({"role": "user", "content": words(40, 100 * chat + turn)})
                        cached, said = await turn_of(api, messages, is_stream=turn % 2 == 1)
                        messages.append({"role": "assistant", "content": said})
                        assert cached >= 192 or not turn, (chat, turn, cached)
                        await client.flush()
                        await until(lambda: compared(server) == chat * TURNS + turn + 1)
                        if encode is None:
                            prompt = await tokenized_by_engine(engines[0], messages[:-1])
                        else:
                            prompt = encode(SERVED_NAME, {"messages": messages[:-1]})
                        await until(lambda: matched(server, prompt) == len(prompt) // block_size)
                assert not any(error for error in errors(server)), server.request("GET", "/trust")

        run(chats())
        assert server.fleet_load() == (0, 0, 0)


async def turn_of(api: Any, messages: list[Any], *, is_stream: bool) -> tuple[int, str]:
    """Cached tokens and text of an answer."""
    asked: Any = {"model": SERVED_NAME, "messages": messages, "max_tokens": OUTPUT}
    if not is_stream:
        answer = await api.chat.completions.create(**asked)
        usage, said = answer.usage, answer.choices[0].message.content
    else:
        stream = await api.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        usage = chunks[-1].usage
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return usage.prompt_tokens_details.cached_tokens or 0, said or ""


def matched(server: Server, prompt: Sequence[int]) -> int:
    """Blocks of a prompt that the service knows, of whoever holds most."""
    body = {"token_ids": list(prompt), "model_name": SERVED_NAME}
    answer: Any = server.request("POST", "/overlap_scores", body).json
    found: int = max(row["device_blocks"] for row in answer["workers"])
    return found


def compared(server: Server) -> int:
    """Prompts whose prediction was compared with what the engine found."""
    text = server.request("GET", "/metrics").raw.decode()
    name = "select_service_cached_tokens_told_total"
    rows = (line.rpartition(" ") for line in text.splitlines() if line.startswith(name))
    return sum(int(float(value)) for row, _, value in rows if 'outcome="compared"' in row)


def errors(server: Server) -> list[float]:
    """How far predictions are off, by rank."""
    answer: Any = server.request("GET", "/trust").json
    return [
        one[name] or 0 for one in answer["ranks"] for name in ("prediction_error", "missing_share")
    ]
