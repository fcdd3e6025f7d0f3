"""A simulated engine behind the HTTP interface of vLLM, as far as gateways and clients use it.

`python -m select_service.demo.openai_engine --port 8000 --worker-id 1` registers itself as a worker
of the service. Tokens are the bytes of the text, answers repeat the end of the prompt; the cache,
its events and the time that prompts take are those of `worker.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from select_service.client import AsyncClient, Client, ClientError, ServiceError
from select_service.demo.engine import DemoJob
from select_service.demo.worker import EngineDown, EngineShape, Milestone, SimulatedWorker
from select_service.standard_output import complain
from select_service.tcp_listener import bind_tcp
from select_service.types import WorkerSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from starlette.requests import Request

    from select_service.demo.worker import Progress

MODEL: Final = "simulated"
_TOKENS: Final = 16  # of an answer, unless the request says more
_VOCABULARY: Final = 256  # tokens of requests are any numbers; texts are bytes


class OpenAIEngine:
    """The routes of one engine, which runs as long as its application.

    Attributes:
        worker: The engine behind them; `up = False` makes it answer 503.
        requests: Completions that were asked for.
        refused_fields: Members of a completion that it knows nothing of, and refuses.
    """

    def __init__(self, worker_id: int, shape: EngineShape | None = None) -> None:
        self.worker = SimulatedWorker(worker_id, shape or EngineShape())
        self.requests = 0
        self.refused_fields = {"cache_salt"}
        self._numbers = itertools.count()
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._completions, methods=["POST"]),
            ],
            lifespan=self._lifespan,
        )

    def spec(self, endpoint: str) -> WorkerSpec:
        """Return the worker's record.

        Args:
            endpoint: where the application is served.
        """
        return WorkerSpec(
            worker_id=self.worker.worker_id,
            endpoint=endpoint,
            block_size=self.worker.shape.block_size,
            total_kv_blocks=self.worker.shape.blocks,
            kv_events_endpoint=self.worker.kv_events_endpoint,
            replay_endpoint=self.worker.replay_endpoint,
        )

    def prompt(self, body: dict[str, Any]) -> list[int]:
        """Return the tokens that a completion is computed for."""
        return prompt_of(body)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self.worker.run())
            yield
            running.cancel()
        self.worker.close()

    async def _health(self, _request: Request) -> Response:
        return Response(status_code=200 if self.worker.up else 503)

    async def _models(self, _request: Request) -> Response:
        model = {"id": MODEL, "object": "model", "owned_by": "select-service", "parent": None}
        return JSONResponse({"object": "list", "data": [model]})

    async def _tokenize(self, request: Request) -> Response:
        tokens = prompt_of(msgspec.json.decode(await request.body()))
        return JSONResponse({"tokens": tokens, "count": len(tokens)})

    async def _completions(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        self.requests += 1
        for name in self.refused_fields & body.keys():
            error = {"message": f"{name} is not known", "type": "BadRequestError", "code": 400}
            return JSONResponse({"error": error}, status_code=400)
        prompt = self.prompt(body)
        most = body.get("max_completion_tokens") or body.get("max_tokens") or _TOKENS
        output = [prompt[-most:][at % min(most, len(prompt))] for at in range(most)]
        name = f"{self.worker.worker_id}-{next(self._numbers)}"
        try:
            progress = self.worker.submit(DemoJob(name, prompt, output))
        except EngineDown:
            error = {"message": "the engine is down", "type": "server_error", "code": 503}
            return JSONResponse({"error": error}, status_code=503)
        answer = _Answer(name, body, prompt, output, progress, self.worker.shape.block_size)
        if body.get("stream"):
            return StreamingResponse(answer.events(), media_type="text/event-stream")
        return JSONResponse(await answer.whole())


class _Answer:
    """One completion, as a whole or as a stream."""

    def __init__(
        self,
        name: str,
        body: dict[str, Any],
        prompt: list[int],
        output: list[int],
        progress: Progress,
        block_size: int,
    ) -> None:
        self._is_chat = "messages" in body
        self._usage_wanted = bool((body.get("stream_options") or {}).get("include_usage"))
        self._prompt, self._output, self._progress = prompt, output, progress
        self._block_size = block_size
        kind = "chat.completion" if self._is_chat else "text_completion"
        self._known: dict[str, object] = {
            "id": f"cmpl-{name}",
            "object": kind,
            "created": int(time.time()),  # noqa: TID251 - for people
            "model": body.get("model") or MODEL,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events: one for each step of the answer."""
        if self._is_chat:
            self._known["object"] = "chat.completion.chunk"
        sent = 0
        async for done in self._steps():
            for token in self._output[sent:done]:
                yield self._event([self._choice(_text([token]), "delta", None)])
            sent = done
        yield self._event([self._choice("", "delta", "length")])
        if self._usage_wanted:
            yield self._event([], usage=self._usage())
        yield b"data: [DONE]\n\n"

    async def whole(self) -> dict[str, object]:
        """Return the answer when it is complete."""
        async for _ in self._steps():
            pass
        choice = self._choice(_text(self._output), "message", "length")
        return {**self._known, "choices": [choice], "usage": self._usage()}

    async def _steps(self) -> AsyncIterator[int]:
        """Yield how many tokens of the answer there are, as they come."""
        done = 0
        while (milestone := await self._progress.milestones.get()) is not Milestone.FINISHED:
            if milestone is Milestone.LOST:
                raise EngineDown
            done = min(done + (self._block_size if done else 1), len(self._output))
            yield done
        yield len(self._output)

    def _choice(self, text: str, place: str, reason: str | None) -> dict[str, object]:
        content: dict[str, object] = {"text": text}
        if self._is_chat:
            content = {place: {"role": "assistant", "content": text}}
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason}

    def _event(self, choices: list[dict[str, object]], **more: object) -> bytes:
        return (
            b"data: " + msgspec.json.encode({**self._known, "choices": choices, **more}) + b"\n\n"
        )

    def _usage(self) -> dict[str, object]:
        cached = self._progress.cached_blocks * self._block_size
        return {
            "prompt_tokens": len(self._prompt),
            "completion_tokens": len(self._output),
            "total_tokens": len(self._prompt) + len(self._output),
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def prompt_of(body: dict[str, Any]) -> list[int]:
    """Return the tokens of a request: those that it has, or the bytes of its text."""
    if "messages" not in body:
        prompt = body["prompt"]
        return list(prompt.encode()) if isinstance(prompt, str) else prompt
    tools = msgspec.json.encode(body["tools"]).decode() if body.get("tools") else ""
    messages = (f"<{one['role']}>{_content(one.get('content'))}\n" for one in body["messages"])
    return list(f"{tools}{''.join(messages)}<assistant>".encode())


def _content(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "".join(one.get("text", f"<{one['type']}>") for one in content)
    return content or ""


def _text(tokens: Sequence[int]) -> str:
    return bytes(one % _VOCABULARY for one in tokens).decode("latin-1")


def main(argv: Sequence[str] | None = None) -> None:
    """Serve one engine until it is interrupted."""
    import uvicorn

    parser = argparse.ArgumentParser(
        prog="python -m select_service.demo.openai_engine",
        description="A simulated engine with vLLM's routes. It registers with a service, and "
        "leaves it when it ends. Tokens are bytes, and answers repeat the end of the prompt.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    parser.add_argument("--worker-id", type=int, default=1, help="its id among the workers")
    parser.add_argument(
        "--service", default="http://localhost:8092", help="the service that it registers with"
    )
    arguments = parser.parse_args(argv)
    engine = OpenAIEngine(arguments.worker_id)
    opened = contextlib.ExitStack()

    async def run() -> None:
        # first the port: a worker behind one that another process has would get its requests
        entrances = bind_tcp(arguments.host, arguments.port)
        for one in entrances:
            opened.enter_context(one)
        server = uvicorn.Server(uvicorn.Config(engine.app, access_log=False, log_level="warning"))
        async with AsyncClient(arguments.service) as client:
            spec = engine.spec(f"http://{arguments.host}:{arguments.port}")
            await client.upsert_worker(spec)
        complain(
            f"{spec.endpoint} is worker {spec.worker_id} of {arguments.service}; Ctrl-C ends it"
        )
        try:
            await server.serve(sockets=entrances)
        finally:  # what interrupts would cancel a call that is awaited
            with (
                contextlib.suppress(ClientError, ServiceError),
                Client(arguments.service) as client,
            ):
                client.delete_worker(arguments.worker_id)

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        parser.exit(130)
    except (ClientError, ServiceError) as error:
        remedy = "Start the service first (make run), or name it with --service."
        if isinstance(error, ServiceError):  # it runs
            remedy = f"{arguments.service} refuses the engine; it is for services without tokens."
        parser.exit(1, f"{error}\n{remedy}\n")
    except OSError as error:
        parser.exit(
            1,
            f"cannot listen on {arguments.host} port {arguments.port}: {error.strerror}. "
            "--port N takes another.\n",
        )
    finally:
        opened.close()
        engine.worker.close()


if __name__ == "__main__":
    main()
