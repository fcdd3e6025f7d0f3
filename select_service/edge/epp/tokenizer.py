"""Has prompts tokenized by the engines themselves, with their `/tokenize`, and remembers answers.

An engine's own tokens are the ones in its cache, chat template included. Engines are asked in turn;
one that fails is left alone for a while. Nobody waits longer than the timeout, and whatever goes
wrong leaves a prompt to be placed by load alone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct

from indexer.core.packing import pack_tokens
from indexer.errors import IndexerError
from indexer.http_client import http_client

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import httpx

    from indexer.edge.addresses import Addresses
    from select_service.edge.epp.traffic import PickerTraffic
    from select_service.types.endpoint_picker import PickerLimits

__all__ = ["PAUSE_S", "Tokenizer"]

PAUSE_S: Final = 5.0
"""How long an engine is not asked after it has failed: it restarts, or has no such route."""

_ANSWER_BYTES_PER_TOKEN: Final = 16
_ANSWER_BYTES: Final = 4096
"""An answer's bytes are bounded by those of the text: a text has at most one token per byte."""

_ENTRY_BYTES: Final = 200
"""What a remembered prompt costs besides its tokens."""

_OK: Final = 200
_HEADERS: Final = {"content-type": "application/json"}


class _Answer(Struct):
    tokens: list[Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]]


_ANSWERS: Final = msgspec.json.Decoder(_Answer)


class Tokenizer:
    """Asks engines, of one event loop. Close it in the end."""

    def __init__(
        self,
        addresses: Addresses,
        limits: PickerLimits,
        traffic: PickerTraffic,
        clock: Callable[[], float],
    ) -> None:
        """Connect to nobody yet.

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
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
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
            The tokens, or why there are none: one of `traffic.LOAD_ALONE`.
        """
        named = partition.encode("utf-8", "surrogatepass")
        key = blake2b(b"%d:%b%b" % (len(named), named, text), digest_size=16).digest()
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            self._traffic.prompts["cached"] += 1
            return known
        if not self._limits.tokenize_timeout_s:
            return "engine_off"
        if self._running >= self._limits.tokenize_calls_max:
            self._traffic.limit_hits["epp_tokenize_calls_max"] += 1
            return "engine_busy"
        engine = self._next(engines())
        if engine is None:
            return "no_engine"
        found = await self._tokenized(engine, text)
        if isinstance(found, bytes):
            self._traffic.prompts["tokenized"] += 1
            self._remember(key, found)
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
            traffic.limit_hits["epp_tokenize_timeout_s"] += 1
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

    async def _ask(self, engine: str, text: bytes) -> bytes | None:
        """Return the packed tokens; None: the engine or the way to it has failed."""
        import httpx  # a tenth of a second, for those who ask

        if self._client is None:
            self._client = http_client(self._limits.tokenize_timeout_s)
        most = _ANSWER_BYTES + _ANSWER_BYTES_PER_TOKEN * max(len(text), _ANSWER_BYTES)
        try:
            where = await self._addresses.route(engine.rstrip("/") + "/tokenize")
            headers = {**_HEADERS, **where.headers}
            async with self._client.stream(
                "POST", where.url, content=text, headers=headers, extensions=where.extensions
            ) as answer:
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

    def _remember(self, key: bytes, tokens: bytes) -> None:
        traffic, most = self._traffic, self._limits.tokenize_cache_bytes
        size = len(tokens) + _ENTRY_BYTES
        if size > most:
            return
        if key not in self._known:
            traffic.cache_bytes += size
        self._known[key] = tokens
        while traffic.cache_bytes > most:
            _, oldest = self._known.popitem(last=False)
            traffic.cache_bytes -= len(oldest) + _ENTRY_BYTES
