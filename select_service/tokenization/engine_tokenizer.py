"""Has prompts tokenized by the engines themselves, with their `/tokenize`, and remembers answers.

An engine's own tokens are the ones in its cache, chat template included. Engines are asked in turn;
one that fails is left alone for a while. No request waits longer than the timeout, and what goes
wrong leaves a prompt to be placed by load alone.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

import msgspec
from msgspec import Meta, Struct

from indexer.core.packing import pack_tokens
from indexer.edge.addresses import CheckedUrl
from indexer.errors import IndexerError
from indexer.http_client import http_client
from select_service.tokenization.openai_body import unknown_hashes
from select_service.tokenization.token_cache import TokenCache, cache_key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import httpx

    from select_service.tokenization.openai_body import PromptBody


PAUSE_S: Final = 5.0
"""How long an engine is not asked after it has failed: it restarts, or has no such route."""

_ANSWER_BYTES_PER_TOKEN: Final = 16
_ANSWER_BYTES: Final = 4096
"""An answer's bytes are bounded by those of the text: a text has at most one token per byte."""

_OK: Final = 200
_AT_FAULT: Final = (400, 413, 422)
"""Statuses by which an engine refuses the text, not the question."""

_HEADERS: Final = {"content-type": "application/json"}


class _Answer(Struct):
    tokens: list[Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]]


_ANSWERS: Final = msgspec.json.Decoder(_Answer)


class UrlResolver(Protocol):
    """Says how to request a URL, or refuses it."""

    async def route(self, url: str) -> CheckedUrl:
        """Return how to request it.

        Raises:
            IndexerError: it must not be requested, or its host is not found.
        """
        ...


class AnyUrl:
    """Every URL may be requested: its source is trusted."""

    async def route(self, url: str) -> CheckedUrl:
        """Return it as it is."""
        return CheckedUrl(url, {}, {})


class TokenizerLimits(Protocol):
    """How long engines are asked, how many at a time, and how much is remembered."""

    @property
    def tokenize_timeout_s(self) -> float:
        """The wait for one answer; 0: no engine is asked."""
        ...

    @property
    def tokenize_calls_max(self) -> int:
        """Prompts that engines tokenize at one time."""
        ...

    @property
    def tokenize_cache_bytes(self) -> int:
        """Memory of answers."""
        ...


class TokenizerTraffic(Protocol):
    """What is counted."""

    prompts: dict[str, int]
    """By where the tokens came from: `tokenized`, `cached`."""
    load_alone: dict[str, int]
    """Prompts without tokens, by reason."""
    tokenize_calls: int
    tokenize_seconds: float
    cache_bytes: int

    def hit_limit(self, name: str) -> None:
        """Count that one of `TokenizerLimits` was in the way."""
        ...


class EngineTokenizer:
    """Asks engines, of one event loop. Close it in the end."""

    def __init__(
        self,
        addresses: UrlResolver,
        limits: TokenizerLimits,
        traffic: TokenizerTraffic,
        clock: Callable[[], float],
    ) -> None:
        """Make no connection yet.

        Args:
            addresses: says which endpoints may be asked.
            limits: how long, how many at a time, how much is remembered.
            traffic: counts.
            clock: monotonic seconds.
        """
        self._addresses, self._limits, self._traffic = addresses, limits, traffic
        self._clock = clock
        self._client: httpx.AsyncClient | None = None
        self._paused: dict[str, float] = {}  # endpoints that failed, and until when
        self._known = TokenCache(limits.tokenize_cache_bytes)
        self._turn = 0
        self._running = 0

    async def close(self) -> None:
        """Close connections. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def tokens(
        self, partition: str, text: bytes, engines: Callable[[], Sequence[str]]
    ) -> bytes | str:
        """Return the tokens of a prompt, packed as numbers of four bytes, little-endian.

        Args:
            partition: the model and tenant; other models have other tokens.
            text: the body of the request to an engine.
            engines: returns their base URLs; called only if one has to be asked.

        Returns:
            The tokens, or why there are none: one of `openai_body.LOAD_ALONE`.
        """
        key = cache_key(partition, text)
        known = self._known.get(key)
        if known is not None:
            self._traffic.prompts["cached"] += 1
            return known
        if not self._limits.tokenize_timeout_s:
            return "engine_off"
        if self._running >= self._limits.tokenize_calls_max:
            self._traffic.hit_limit("tokenize_calls_max")
            return "engine_busy"
        engine = self._next(engines())
        if engine is None:
            return "no_engine"
        found = await self._tokenized(engine, text)
        if isinstance(found, bytes):
            self._traffic.prompts["tokenized"] += 1
            self._known.put(key, found)
            self._traffic.cache_bytes = self._known.bytes
        return found

    async def _tokenized(self, engine: str, text: bytes) -> bytes | str:
        """Return the tokens, or what went wrong, within the timeout."""
        limits, traffic = self._limits, self._traffic
        began = self._clock()
        self._running += 1
        try:
            async with asyncio.timeout(limits.tokenize_timeout_s):
                found = await self._ask(engine, text)
        except TimeoutError:
            traffic.hit_limit("tokenize_timeout_s")
            return "engine_timeout"  # perhaps of this prompt: the engine is asked again
        finally:
            self._running -= 1
            traffic.tokenize_calls += 1
            traffic.tokenize_seconds += self._clock() - began
        if found is None:
            self._paused[engine] = self._clock() + PAUSE_S
            return "engine_failed"
        return found

    def _next(self, engines: Sequence[str]) -> str | None:
        now = self._clock()
        if self._paused:
            self._paused = {one: until for one, until in self._paused.items() if until > now}
        for _ in engines:
            self._turn += 1
            engine = engines[self._turn % len(engines)]
            if engine not in self._paused:
                return engine
        return None

    async def _ask(self, engine: str, text: bytes) -> bytes | str | None:
        """Return the packed tokens, or a refusal; None: the engine or the way to it has failed."""
        import httpx  # a tenth of a second, only where it is needed

        if self._client is None:
            self._client = http_client(self._limits.tokenize_timeout_s)
        most = _ANSWER_BYTES + _ANSWER_BYTES_PER_TOKEN * max(len(text), _ANSWER_BYTES)
        try:
            where = await self._addresses.route(engine.rstrip("/") + "/tokenize")
            headers = {**_HEADERS, **where.headers}
            async with self._client.stream(
                "POST", where.url, content=text, headers=headers, extensions=where.extensions
            ) as answer:
                if answer.status_code in _AT_FAULT:
                    return "engine_refused"
                if answer.status_code != _OK:
                    return None
                content = bytearray()
                async for piece in answer.aiter_bytes():
                    content += piece
                    if len(content) > most:
                        return None
            # An engine that finds no tokens has failed.
            return pack_tokens(_ANSWERS.decode(content).tokens) or None
        except (
            IndexerError,
            httpx.HTTPError,
            httpx.InvalidURL,
            msgspec.MsgspecError,
            UnicodeDecodeError,
            RecursionError,
        ):
            return None


async def prompt_fields(
    body: PromptBody,
    tokens_of: Callable[[str, bytes, Callable[[], Sequence[str]]], Awaitable[bytes | str]],
    partition: str,
    engines: Callable[[], Sequence[str]],
    block_size: int,
    traffic: TokenizerTraffic,
) -> dict[str, Any]:
    """Return the fields of POST /select_and_reserve that stand for a prompt.

    Args:
        body: as it was read.
        tokens_of: `EngineTokenizer.tokens`, or another one of text.
        partition: where the tokens of a text are alike.
        engines: returns the base URLs of those that may be asked.
        block_size: of the workers, for a prompt without tokens.
        traffic: counts.
    """
    reason, tokens = body.reason, body.token_ids
    if tokens is not None:
        traffic.prompts["token_ids"] += 1
    elif body.text is not None:
        found = await tokens_of(partition, body.text, engines)
        if isinstance(found, bytes):
            tokens = found
        else:
            reason = found
    if tokens is not None:
        return {"token_ids": tokens}
    traffic.prompts["load_alone"] += 1
    traffic.load_alone[reason] += 1
    hashes = unknown_hashes(body.length, block_size)
    return {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": body.length}


def engine_url(endpoint: str) -> str:
    """Return the base URL of a worker's endpoint, which may be `host:port` alone."""
    return (endpoint if "://" in endpoint else f"http://{endpoint}").rstrip("/")
