"""Sends canary prompts to engines and looks in the service's index who tells of them.

The only model traffic of this product: a few blocks of made-up tokens with one token of output, and
only when `select-service doctor --probe` is asked for it. `core/diagnostics/parity.py` makes the
prompts and judges what became of them.
"""

from __future__ import annotations

import asyncio
from random import SystemRandom
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import httpx
import msgspec
from msgspec import Struct

from indexer.http_client import http_client
from select_service.client import ClientError, ServiceError
from select_service.client.reservation import RANK_HEADER
from select_service.core.diagnostics.parity import (
    CANARIES_MAX,
    CanaryOutcome,
    Kind,
    canary_text,
    canary_tokens,
    judge,
)
from select_service.types import OverlapScores

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from select_service.client import AsyncClient
    from select_service.doctor.query import ReachableWorker
    from select_service.types.doctor import Finding

__all__ = ["ENGINES_AT_ONCE", "EVENTS_S", "CanaryReport", "send_canaries"]

ENGINES_AT_ONCE: Final = 16

EVENTS_S: Final = 5.0
"""How long an engine may take to tell of what it has computed."""

_POLL_S: Final = 0.05
_OK: Final = 200
_QUOTED: Final = 200
_REFUSED_FIELD: Final = (400, 422)


class CanaryReport(NamedTuple):
    """What all canary prompts have found, of the ranks of workers that can be chosen."""

    ranks: int
    asked: int
    """Those behind whose endpoint an OpenAI server answers; others get no canary."""
    agree: int
    """Those that tell of it under the names of this service."""
    findings: list[Finding]

    @property
    def text(self) -> str:
        """The sentence for people."""
        told = f"Canary prompts: {self.agree} of {self.asked} ranks tell of them as expected."
        if self.asked < self.ranks:
            told += f" {self.ranks - self.asked} more have no OpenAI server, and were sent none."
        return told


class _Model(Struct):
    id: str
    parent: str | None = None


class _Models(Struct):
    data: list[_Model]


class _Tokenized(Struct):
    tokens: list[int]


async def send_canaries(
    client: AsyncClient,
    workers: Iterable[ReachableWorker],
    timeout_s: float,
    events_s: float = EVENTS_S,
    prefix: str = "",
) -> CanaryReport:
    """Ask every rank to compute prompts that nobody has sent before, and look who tells of them.

    Args:
        client: of the service.
        workers: as the service lists them.
        timeout_s: longest wait for an engine's answer.
        events_s: longest wait for its events after that.
        prefix: of the service's paths.

    Raises:
        ServiceError: the service may not be asked; nothing was sent to any engine.
        ClientError: it does not answer.
    """
    ranks = [
        (worker, number)
        for worker in workers
        if worker.lifecycle == "schedulable"
        for number in range(len(_ranks_of(worker)))
    ]
    index = _Index(client, prefix, events_s)
    for worker, _ in ranks[:1]:
        await index.holders(worker, canary_tokens(worker.block_size or 1, SystemRandom()), wait_s=0)
    turn = asyncio.Semaphore(ENGINES_AT_ONCE)
    async with http_client(timeout_s) as http:

        async def probe(worker: ReachableWorker, number: int) -> list[CanaryOutcome]:
            async with turn:
                return await _Canaries(index, http, worker, number).outcomes()

        found = await asyncio.gather(*(probe(*one) for one in ranks))
    findings = [one for outcomes in found for one in map(judge, outcomes) if one is not None]
    agree = sum(bool(outcomes) and not any(map(judge, outcomes)) for outcomes in found)
    return CanaryReport(len(ranks), sum(map(bool, found)), agree, findings)


def _ranks_of(worker: ReachableWorker) -> Sequence[int]:
    """Return the ranks of a worker, in the order in which its server counts them."""
    first = worker.data_parallel_start_rank or 0
    named = sorted(map(int, worker.kv_events_endpoints))
    return named or range(first, first + (worker.data_parallel_size or 1))


class _Index:
    """Who holds what, as the service knows."""

    def __init__(self, client: AsyncClient, prefix: str, wait_s: float) -> None:
        self._client, self._path, self._wait_s = client, f"{prefix}/overlap_scores", wait_s

    async def holders(
        self,
        worker: ReachableWorker,
        tokens: list[int],
        *,
        wait_s: float | None = None,
        **salt: Any,
    ) -> list[tuple[int, int]]:
        """Return who holds the beginning of a prompt, as soon as somebody does."""
        until = monotonic() + (self._wait_s if wait_s is None else wait_s)
        scope = {"model_name": worker.model_name, "tenant_id": worker.tenant_id}
        body: dict[str, object] = {"token_ids": tokens, **scope, **salt}
        while True:
            found = await self._client.call("POST", self._path, body, OverlapScores)
            enough = max(1, found.num_blocks // 2)  # of small blocks, the first may be anybody's
            holders = [
                (one.worker_id, one.dp_rank) for one in found.workers if one.device_blocks >= enough
            ]
            if holders or monotonic() > until:
                return holders
            await asyncio.sleep(_POLL_S)


class _Canaries:
    """The prompts for one rank."""

    def __init__(
        self, index: _Index, http: httpx.AsyncClient, worker: ReachableWorker, number: int
    ) -> None:
        ranks = _ranks_of(worker)
        self._index, self._http, self._worker = index, http, worker
        self._rank = ranks[number]
        self._headers = {RANK_HEADER: str(number)} if len(ranks) > 1 else {}
        self._url = (worker.endpoint or "").rstrip("/")
        self._rng = SystemRandom()  # what an earlier run has sent is cached, and told of no more
        self._size = worker.block_size or 1
        self._model = ""

    async def outcomes(self) -> list[CanaryOutcome]:
        """Return what became of each; none: no OpenAI server is there."""
        if not self._url.startswith(("http://", "https://")):
            return []
        answer = await self._get("/v1/models")
        try:
            if answer is None or answer.status_code != _OK:
                return []
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
        others = [await self._of_tokens("salt", cache_salt=f"canary-{self._rng.getrandbits(64):x}")]
        others.append(await self._of_chat())
        return [first, *(one for one in others if one is not None)]

    async def _of_tokens(self, kind: Kind, **fields: str) -> CanaryOutcome | None:
        tokens = canary_tokens(self._size, self._rng)
        answer = await self._complete({"prompt": tokens, **fields})
        if fields and isinstance(answer, httpx.Response) and answer.status_code in _REFUSED_FIELD:
            return None  # an engine without salts
        return await self._outcome(kind, answer, tokens, **fields)

    async def _of_chat(self) -> CanaryOutcome | None:
        text = canary_text(self._size, self._rng)
        chat = {"messages": [{"role": "user", "content": text}]}
        told = await self._post("/tokenize", chat)
        try:
            if isinstance(told, str) or told.status_code != _OK:
                return None  # an engine that tokenizes no chats
            tokens = msgspec.json.decode(told.content, type=_Tokenized).tokens
        except msgspec.MsgspecError:
            return None
        answer = await self._complete(chat, "/v1/chat/completions")
        if not isinstance(answer, str) and answer.status_code != _OK:
            return None  # a model without chats
        return await self._outcome("chat", answer, tokens)

    async def _outcome(
        self, kind: Kind, answer: httpx.Response | str, tokens: list[int], **fields: Any
    ) -> CanaryOutcome:
        trouble, holders = "", []
        if isinstance(answer, str):
            trouble = answer
        elif answer.status_code != _OK:
            trouble = f"status {answer.status_code}: {answer.text[:_QUOTED]}"
        else:
            try:
                holders = await self._index.holders(self._worker, tokens, **fields)
            except (ServiceError, ClientError) as error:
                trouble = f"the service cannot be asked who holds it: {error}"
        return CanaryOutcome(
            model_name=self._worker.model_name,
            tenant_id=self._worker.tenant_id,
            worker_id=self._worker.worker_id,
            dp_rank=self._rank,
            endpoint=self._url,
            kind=kind,
            trouble=trouble,
            holders=holders,
        )

    async def _complete(
        self, prompt: dict[str, Any], path: str = "/v1/completions"
    ) -> httpx.Response | str:
        return await self._post(path, {**prompt, "max_tokens": 1, "temperature": 0})

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response | str:
        try:
            return await self._http.post(
                self._url + path, json={"model": self._model, **body}, headers=self._headers
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{type(error).__name__}: {error}"

    async def _get(self, path: str) -> httpx.Response | None:
        try:
            return await self._http.get(self._url + path)
        except (httpx.HTTPError, httpx.InvalidURL):
            return None  # `probe.py` tells of ports that do not answer
