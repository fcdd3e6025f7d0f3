"""Sends canary prompts to engines and looks in the index which ranks report them.

The only model traffic of this product: a few blocks of made-up tokens with one token of output, and
only when it is asked for (`select-service doctor --probe`, or `--probe-workers` of the service).
`core/diagnostics/parity.py` makes the prompts and judges what became of them.
"""

from __future__ import annotations

import asyncio
from random import SystemRandom
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import httpx
import msgspec
from msgspec import Struct

from indexer.core.packing import pack_tokens
from indexer.errors import IndexerError
from indexer.http_client import http_client
from select_service.core.diagnostics.parity import (
    CANARIES_MAX,
    CanaryOutcome,
    Kind,
    canary_text,
    canary_tokens,
    judge,
)
from select_service.types import OverlapScores, OverlapScoresRequest
from select_service.types.selections import RANK_HEADER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from select_service.tokenization.engine_tokenizer import UrlResolver

__all__ = [
    "ENGINES_AT_ONCE",
    "EVENTS_S",
    "Canaries",
    "CanaryTarget",
    "CannotLook",
    "targets_of",
]

ENGINES_AT_ONCE: Final = 16

EVENTS_S: Final = 5.0
"""How long an engine may take to report what it has computed."""

TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.05
_OK: Final = 200
_QUOTED: Final = 200
_REFUSED_FIELD: Final = (400, 422)


class Record(Protocol):
    """What of a worker's record says which ranks there are, and where."""

    @property
    def worker_id(self) -> int: ...
    @property
    def model_name(self) -> str: ...
    @property
    def endpoint(self) -> str | None: ...
    @property
    def block_size(self) -> int | None: ...
    @property
    def data_parallel_start_rank(self) -> int | None: ...
    @property
    def data_parallel_size(self) -> int | None: ...
    @property
    def kv_events_endpoints(self) -> Mapping[str, str]: ...


def targets_of(worker: Record, tenant_id: str) -> list[CanaryTarget]:
    """Return the ranks of a worker, in the order in which its server counts them."""
    first = worker.data_parallel_start_rank or 0
    named = sorted(map(int, worker.kv_events_endpoints))
    ranks = named or [*range(first, first + (worker.data_parallel_size or 1))]
    return [
        CanaryTarget(
            model_name=worker.model_name,
            tenant_id=tenant_id,
            worker_id=worker.worker_id,
            dp_rank=rank,
            number=number,
            ranks=len(ranks),
            endpoint=worker.endpoint or "",
            block_size=worker.block_size or 1,
        )
        for number, rank in enumerate(ranks)
    ]


class _Model(Struct):
    id: str
    parent: str | None = None


class _Models(Struct):
    data: list[_Model]


class _Tokenized(Struct):
    tokens: list[int]


class CanaryTarget(NamedTuple):
    """A rank that is to compute a prompt."""

    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    number: int
    """Of the rank behind its endpoint, as the server there counts them, from 0."""
    ranks: int
    endpoint: str
    block_size: int


class CannotLook(Exception):
    """The index cannot be asked; the text says why."""


Look: TypeAlias = "Callable[[OverlapScoresRequest], Awaitable[OverlapScores]]"
"""Asks the index which ranks hold a prompt; raises CannotLook."""


class Canaries:
    """Sends prompts to engines."""

    def __init__(
        self,
        look: Look,
        urls: UrlResolver,
        *,
        timeout_s: float = TIMEOUT_S,
        events_s: float = EVENTS_S,
    ) -> None:
        """Make no connection yet.

        Args:
            look: asks the index.
            urls: says which endpoints may be asked.
            timeout_s: longest wait for an engine's answer.
            events_s: longest wait for its events after that.
        """
        self._look, self._urls = look, urls
        self._timeout_s, self._events_s = timeout_s, events_s

    async def send(self, targets: Sequence[CanaryTarget]) -> list[list[CanaryOutcome]]:
        """Ask ranks to compute prompts that were never sent before, and look which report them.

        Returns:
            What became of them, by rank; nothing for one without an OpenAI server.

        Raises:
            CannotLook: the index cannot be asked; nothing was sent to any engine.
        """
        for target in targets[:1]:
            await self._holders(target, canary_tokens(target.block_size, SystemRandom()), None, 0.0)
        turn = asyncio.Semaphore(ENGINES_AT_ONCE)
        async with http_client(self._timeout_s) as http:

            async def probe(target: CanaryTarget) -> list[CanaryOutcome]:
                async with turn:
                    return await _Rank(self._holders, self._urls, http, target).outcomes()

            return await asyncio.gather(*map(probe, targets))

    async def _holders(
        self, target: CanaryTarget, tokens: list[int], salt: str | None, wait_s: float | None = None
    ) -> list[tuple[int, int]]:
        """Return the ranks that hold the beginning of a prompt, once there are any."""
        until = monotonic() + (self._events_s if wait_s is None else wait_s)
        request = OverlapScoresRequest(
            model_name=target.model_name,
            tenant_id=target.tenant_id,
            token_ids=pack_tokens(tokens),
            cache_salt=salt,
        )
        while True:
            found = await self._look(request)
            enough = max(1, found.num_blocks // 2)  # of small blocks, the first may be anybody's
            holders = [
                (one.worker_id, one.dp_rank) for one in found.workers if one.device_blocks >= enough
            ]
            if holders or monotonic() > until:
                return holders
            await asyncio.sleep(_POLL_S)


class _Rank:
    """The prompts for one rank."""

    def __init__(
        self,
        holders: Callable[[CanaryTarget, list[int], str | None], Awaitable[list[tuple[int, int]]]],
        urls: UrlResolver,
        http: httpx.AsyncClient,
        target: CanaryTarget,
    ) -> None:
        self._holders, self._urls, self._http, self._target = holders, urls, http, target
        self._headers = {RANK_HEADER: str(target.number)} if target.ranks > 1 else {}
        self._url = target.endpoint.rstrip("/")
        self._rng = SystemRandom()  # what an earlier run has sent is cached, and reported no more
        self._size = target.block_size
        self._model = ""

    async def outcomes(self) -> list[CanaryOutcome]:
        """Return what became of each; none: no OpenAI server is there."""
        if not self._url.startswith(("http://", "https://")):
            return []
        answer = await self._ask("GET", "/v1/models")
        try:
            if isinstance(answer, str) or answer.status_code != _OK:
                return []  # no server is there, or another one
            models = msgspec.json.decode(answer.content, type=_Models).data
            self._model = next((one.id for one in models if one.parent is None), "")
        except msgspec.MsgspecError:
            return []
        first = await self._of_tokens("tokens")
        assert first is not None
        if judge(first) is not None:
            if not first.trouble:
                for _ in range(CANARIES_MAX - 1):  # so that the service's own checks may name it
                    await self._complete({"prompt": canary_tokens(self._size, self._rng)})
            return [first]
        others = [await self._of_tokens("salt", f"canary-{self._rng.getrandbits(64):x}")]
        others.append(await self._of_chat())
        return [first, *(one for one in others if one is not None)]

    async def _of_tokens(self, kind: Kind, salt: str | None = None) -> CanaryOutcome | None:
        tokens = canary_tokens(self._size, self._rng)
        salted = {} if salt is None else {"cache_salt": salt}
        answer = await self._complete({"prompt": tokens, **salted})
        if salted and isinstance(answer, httpx.Response) and answer.status_code in _REFUSED_FIELD:
            return None  # an engine without salts
        return await self._outcome(kind, answer, tokens, salt)

    async def _of_chat(self) -> CanaryOutcome | None:
        text = canary_text(self._size, self._rng)
        chat = {"messages": [{"role": "user", "content": text}]}
        tokenized = await self._ask("POST", "/tokenize", chat)
        try:
            if isinstance(tokenized, str) or tokenized.status_code != _OK:
                return None  # an engine that tokenizes no chats
            tokens = msgspec.json.decode(tokenized.content, type=_Tokenized).tokens
        except msgspec.MsgspecError:
            return None
        answer = await self._complete(chat, "/v1/chat/completions")
        if not isinstance(answer, str) and answer.status_code != _OK:
            return None  # a model without chats
        return await self._outcome("chat", answer, tokens)

    async def _outcome(
        self, kind: Kind, answer: httpx.Response | str, tokens: list[int], salt: str | None = None
    ) -> CanaryOutcome:
        target, trouble, holders = self._target, "", []
        if isinstance(answer, str):
            trouble = answer
        elif answer.status_code != _OK:
            trouble = f"status {answer.status_code}: {answer.text[:_QUOTED]}"
        else:
            try:
                holders = await self._holders(target, tokens, salt)
            except CannotLook as error:
                trouble = f"the service cannot be asked which ranks hold it: {error}"
        return CanaryOutcome(
            model_name=target.model_name,
            tenant_id=target.tenant_id,
            worker_id=target.worker_id,
            dp_rank=target.dp_rank,
            endpoint=self._url,
            kind=kind,
            trouble=trouble,
            holders=holders,
        )

    async def _complete(
        self, prompt: dict[str, Any], path: str = "/v1/completions"
    ) -> httpx.Response | str:
        return await self._ask("POST", path, {**prompt, "max_tokens": 1, "temperature": 0})

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response | str:
        """Return the answer, or why there is none."""
        sent = None if body is None else {"model": self._model, **body}
        try:
            where = await self._urls.route(self._url + path)
            return await self._http.request(
                method,
                where.url,
                json=sent,
                headers={**self._headers, **where.headers},
                extensions=where.extensions,
            )
        except (httpx.HTTPError, httpx.InvalidURL, IndexerError) as error:
            return f"{type(error).__name__}: {error}"
