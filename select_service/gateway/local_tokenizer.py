"""Tokenizes prompts in threads of this process, and remembers the answers.

A prompt that takes too long is placed without tokens; once it is done its tokens are remembered for
the next time.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from indexer.core.packing import pack_tokens
from select_service.tokenization.token_cache import TokenCache, cache_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from select_service.gateway.options import GatewayOptions, GatewayTraffic

_THREADS: Final = 4
"""Tokenizers are made of native code that lets others run; more threads help little."""

_log = logging.getLogger("select_service.gateway")


class Encode(Protocol):
    """Tokenizes in this process; `HuggingFaceTokenizer` is one. Called in threads."""

    def __call__(self, model: str, prompt: Mapping[str, Any], /) -> Sequence[int]:
        """Return the tokens of the body of a request to vLLM's /tokenize; any error is a no."""
        ...


class LocalTokenizer:
    """Calls a function in threads. Close it in the end."""

    def __init__(self, encode: Encode, options: GatewayOptions, traffic: GatewayTraffic) -> None:
        self._encode = encode
        self._options = options
        self._traffic = traffic
        self._known = TokenCache(options.tokenize_cache_bytes)
        self._threads = ThreadPoolExecutor(_THREADS, "select-service-tokenizer")
        self._running = 0

    async def close(self) -> None:
        """Let the threads end; one that is at work is not waited for. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def tokens(
        self,
        partition: str,
        text: bytes,
        engines: Callable[[], Sequence[str]],
    ) -> bytes | str:
        """Return the packed tokens of a prompt, or why there are none; see `EngineTokenizer`."""
        key = cache_key(partition, text)
        known = self._known.get(key)
        if known is not None:
            self._traffic.prompts["cached"] += 1
            return known
        if self._running >= self._options.tokenize_calls_max:
            self._traffic.hit_limit("tokenize_calls_max")
            return "tokenizer_busy"
        model = partition.partition("\0")[0]
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, self._packed, model, text)
        self._running += 1
        began = loop.time()
        work.add_done_callback(lambda done: self._note(key, done, loop.time() - began))
        try:
            async with asyncio.timeout(self._options.tokenize_timeout_s or None):
                found = await asyncio.shield(work)
        except TimeoutError:
            self._traffic.hit_limit("tokenize_timeout_s")
            return "tokenizer_timeout"
        except Exception:  # noqa: BLE001 - `_note` has logged it; a template may raise anything
            return "tokenizer_failed"
        self._traffic.prompts["tokenized"] += 1
        return found

    def _packed(self, model: str, text: bytes) -> bytes:
        """Tokenize, in a thread.

        Raises:
            ValueError: there are no tokens.
        """
        prompt: dict[str, Any] = msgspec.json.decode(text)
        found = pack_tokens(self._encode(model, prompt))
        if not found:
            raise ValueError("no tokens")
        return found

    def _note(self, key: bytes, work: asyncio.Future[bytes], seconds: float) -> None:
        self._running -= 1
        self._traffic.tokenize_calls += 1
        self._traffic.tokenize_seconds += seconds
        if work.cancelled():
            return
        error = work.exception()
        if error is not None:
            _log.warning("a prompt could not be tokenized: %s: %s", type(error).__name__, error)
            return
        self._known.put(key, work.result())
        self._traffic.cache_bytes = self._known.bytes
