"""An OpenAI-compatible gateway in front of engines that a select-service chooses from.

    pip install '.[gateway]'  # in a checkout; without the extra if --tokenizer is not used
    python examples/gateway/gateway.py --service http://localhost:8092 --port 8080

It works with vLLM as it is. Engines whose /tokenize applies no chat template (SGLang) need the
model's tokenizer here: `--tokenizer Qwen/Qwen3-0.6B`. OpenAI's clients ask it as they ask OpenAI:
`OpenAI(base_url="http://localhost:8080/v1", api_key="-")`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from select_service.client import AsyncClient, MissingPackage, Options
from select_service.gateway import Gateway, GatewayResponse, HuggingFaceTokenizer


class Relay(StreamingResponse):
    """Passes on what the engine answers; however that ends, the reservation is freed."""

    def __init__(self, answer: GatewayResponse) -> None:
        super().__init__(answer, answer.status)
        self.raw_headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in answer.headers]
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            pass  # nobody is there to answer
        finally:
            await self.answer.aclose()


async def until_gone(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def application(gateway: Gateway) -> Starlette:
    """The routes: completions are forwarded, models are listed, counters are shown."""

    async def forward(request: Request) -> Response:
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        answer = asyncio.ensure_future(gateway.forward(body, path=path, headers=request.headers))
        gone = asyncio.ensure_future(until_gone(request))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return Relay(answer.result())
            return Response(status_code=499)
        finally:
            for task in (answer, gone):
                if task.cancel():
                    await asyncio.wait((task,))

    async def models(_: Request) -> Response:
        return Relay(await gateway.models())

    async def stats(_: Request) -> Response:
        return JSONResponse(gateway.stats())

    async def health(_: Request) -> Response:
        return Response()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with gateway:
            yield

    return Starlette(
        routes=[
            Route("/v1/chat/completions", forward, methods=["POST"]),
            Route("/v1/completions", forward, methods=["POST"]),
            Route("/v1/models", models),
            Route("/stats", stats),
            Route("/health", health),
        ],
        lifespan=lifespan,
    )


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until interrupted."""
    tokenizer = HuggingFaceTokenizer(arguments.tokenizer) if arguments.tokenizer else None
    options = Options(retry_refused=False)  # clients learn at once when to come again
    async with AsyncClient(*arguments.service, options=options) as client:
        app = application(Gateway(client, tokenizer=tokenizer))
        config = uvicorn.Config(
            app,
            arguments.host,
            arguments.port,
            access_log=False,
            server_header=False,  # the engine's are passed on
            date_header=False,
        )
        await uvicorn.Server(config).serve()


def port(text: str) -> int:
    """Read a TCP port."""
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise ValueError
    return int(text)


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="An OpenAI-compatible gateway.")
    services = "The select-service; repeat it for each replica. Default: http://localhost:8092."
    parser.add_argument("--service", action="append", metavar="URL", help=services)
    where = "to listen on. Default: %(default)s."
    parser.add_argument("--host", default="127.0.0.1", help=f"Address {where}")
    parser.add_argument("--port", type=port, default=8080, help=f"Port {where}")
    models = "Name of the model on Hugging Face, or its folder. Default: the engines tokenize."
    parser.add_argument("--tokenizer", help=models)
    arguments = parser.parse_args(argv)
    arguments.service = arguments.service or ["http://localhost:8092"]
    try:
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn has ended by then
            asyncio.run(serve(arguments))
    except MissingPackage as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
