"""Conversations through the service to real engines, and what it foretold of each prompt.

A caller as any other: it asks the service, sends the prompt to the engine that was named, reports
what that answered, and goes on with the answer as a part of the next prompt. `cached_tokens` of the
engine's usage is the truth about the tokens that the service took for cached.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

import httpx

from tests.engines.event_log import EventLog, Rank, blocks_of
from tests.engines.evidence import applied_batches, evidence
from tests.engines.exchange import Exchange, Flavor
from tests.engines.tiny_models import FIRST_WORD, VOCABULARY
from tests.engines.vllm_engine import SERVED_NAME
from tests.wait import PATIENCE_S

PROMPT_MAX: Final = 3000
RANK_HEADER: Final = "X-data-parallel-rank"
PAUSES_S: Final = (0.05, 0.15)
"""Between what an engine has published of an answer and the next turn."""
LOOKS: Final = 200
LOOK_S: Final = 0.025
"""An engine is given so much time to publish; it may end before."""


@dataclass
class Traffic:
    """One run of conversations.

    Attributes:
        service: the address of the service.
        scope: the partition's name there.
        workers: the ids there.
        log: of their engines; the next turn comes after an engine published the last one, as
            people and tools need more time than events.
        awaited_blocks: so many of the last whole blocks; the engine publishes one of them, at
            least.
        requests: that many are sent, and each is answered or an error.
        retry: a failed request is sent to another worker, as a caller would.
        pass_rank: whether the engine is given the rank that was chosen.
        full_reports: whether it is asked to publish again which blocks a prompt finds.
    """

    service: str
    scope: str
    workers: Sequence[int]
    log: EventLog
    block_size: int
    awaited_blocks: int
    requests: int
    seed: int = 1
    lanes: int = 4
    flavors: Sequence[Flavor] = (Flavor(),)
    prefixes: int = 6
    prefix_tokens: int = 400
    turns: int = 5
    turn_tokens: int = 60
    output_tokens: int = 24
    retry: bool = False
    pass_rank: bool = False
    full_reports: bool = False
    cancel_share: float = 0.0
    """This share of the requests is streamed, and left by the caller on the way."""
    after: Mapping[int, Callable[[], None]] = field(default_factory=dict)
    """By number of a request: what is done before it is sent."""
    exchanges: list[Exchange] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    started: int = 0
    conversations: int = 0
    cancelled: int = 0
    lags_s: list[float] = field(default_factory=list)
    """Of each request: how long the service took to apply what the engines had published."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.locks = [asyncio.Lock() for _ in range(self.prefixes)]
        self.beginnings = [self.words(self.prefix_tokens + 7 * n) for n in range(self.prefixes)]

    def words(self, count: int) -> list[int]:
        """Random tokens."""
        return [self.rng.randrange(FIRST_WORD, VOCABULARY) for _ in range(count)]

    async def run(self) -> None:
        """Send all requests."""
        limits = httpx.Limits(max_connections=64)
        async with (
            httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as http,
            asyncio.TaskGroup() as lanes,
        ):
            for _ in range(self.lanes):
                lanes.create_task(self._lane(http))

    async def _lane(self, http: httpx.AsyncClient) -> None:
        while self.started < self.requests:
            self.conversations += 1
            flavor = self.flavors[self.conversations % len(self.flavors)]
            await self._conversation(http, flavor)

    async def _conversation(self, http: httpx.AsyncClient, flavor: Flavor) -> None:
        number = self.rng.randrange(len(self.beginnings))
        prompt = list(self.beginnings[number])
        async with self.locks[number]:  # nobody can foretell what is computed right now
            goes_on = await self._turn(http, prompt, flavor)
        for _ in range(self.rng.randrange(self.turns)):
            if not goes_on:
                return
            goes_on = await self._turn(http, prompt, flavor)

    async def _turn(self, http: httpx.AsyncClient, prompt: list[int], flavor: Flavor) -> bool:
        """Say something, and append that and the answer to the prompt; whether there was one."""
        prompt += self.words(self.rng.randint(1, 2 * self.turn_tokens))
        if len(prompt) > PROMPT_MAX or self.started >= self.requests:
            return False
        self.started += 1
        if (act := self.after.get(self.started)) is not None:
            act()
        exchange = await self._request(http, prompt, flavor)
        if exchange is None:
            return False
        prompt += exchange.output
        await self._until_published(exchange)
        await asyncio.sleep(self.rng.uniform(*PAUSES_S))
        return True

    async def _until_published(self, exchange: Exchange) -> None:
        """Wait until the engine published the last blocks; the last token is in none yet."""
        computed = [*exchange.prompt, *exchange.output[:-1]]
        last = blocks_of(computed, self.block_size)[-self.awaited_blocks :]
        stored = self.log.stored[exchange.worker_id, exchange.rank]
        for _ in range(LOOKS):
            if any(block in stored for block in last):
                return
            await asyncio.sleep(LOOK_S)

    async def _applied(self, http: httpx.AsyncClient) -> None:
        """Wait until the service has applied what the log has received: how late it is, is no
        error.

        Where more wants to run than there are processors, libzmq's thread in the service may get
        none for half a second while the event loop goes on.
        """
        begun, received = monotonic(), dict(self.log.last)
        applied: dict[Rank, int] = {}
        try:
            async with asyncio.timeout(PATIENCE_S):
                while any(applied.get(rank, -1) < batch for rank, batch in received.items()):
                    applied = await applied_batches(http, self.service)
        except TimeoutError:
            raise AssertionError(f"received {received}, applied {applied}") from None
        self.lags_s.append(monotonic() - begun)

    async def _request(
        self, http: httpx.AsyncClient, prompt: list[int], flavor: Flavor
    ) -> Exchange | None:
        """What an engine answered; None: none did."""
        failed: list[int] = []
        while True:
            exchange = await self._select(http, prompt, flavor, failed)
            if exchange is None:
                return None
            try:
                await self._ask_engine(http, *exchange)
            except httpx.HTTPError as problem:
                self.errors[f"engine: {type(problem).__name__}"] += 1
                failed.append(exchange[0].worker_id)
                await self._free(http, exchange[1])
                if not self.retry or len(failed) == len(self.workers):
                    return None
                continue
            await self._free(http, exchange[1])
            return exchange[0]

    async def _select(
        self,
        http: httpx.AsyncClient,
        prompt: list[int],
        flavor: Flavor,
        failed: Sequence[int],
    ) -> tuple[Exchange, str, str] | None:
        """What was chosen, the reservation, and the engine's address."""
        await self._applied(http)
        reservation = uuid.uuid4().hex
        begun = monotonic()
        body: dict[str, Any] = {
            "reservation_id": reservation,
            "model_name": self.scope,
            "token_ids": prompt,
            "expected_output_tokens": self.output_tokens,
            **flavor.fields,
        }
        if failed:
            body["allowed_worker_ids"] = [one for one in self.workers if one not in failed]
        answer = await http.post(f"{self.service}/select_and_reserve", json=body)
        said = answer.json()
        if answer.status_code != 200:
            self.errors[f"service: {answer.status_code} {said.get('code')}"] += 1
            return None
        exchange = Exchange(
            worker_id=said["worker_id"],
            rank=said["dp_rank"],
            flavor=flavor,
            prompt=list(prompt),
            # an engine computes a prompt's last token, and so the block with it, in any case
            foretold=min(len(prompt) - said["effective_prefill_tokens"], self._findable(prompt)),
            begun=begun,
        )
        return exchange, reservation, said["endpoint"]

    def _findable(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that an engine can find cached."""
        return (len(prompt) - 1) // self.block_size * self.block_size

    async def _ask_engine(
        self, http: httpx.AsyncClient, exchange: Exchange, reservation: str, endpoint: str
    ) -> None:
        # No seed: vLLM's runner for processors fails with it on a prompt in pieces.
        body: dict[str, Any] = {
            "model": exchange.flavor.adapter or SERVED_NAME,
            "prompt": exchange.prompt,
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "temperature": 0.7,
            "return_token_ids": True,
        }
        if exchange.flavor.salt is not None:
            body["cache_salt"] = exchange.flavor.salt
        if self.full_reports:
            body["vllm_xargs"] = {"kv_cache_report_mode": "full"}
        headers = {RANK_HEADER: str(exchange.rank)} if self.pass_rank else {}
        url = f"{endpoint}/v1/completions"
        if self.rng.random() < self.cancel_share:
            await self._ask_and_leave(http, url, body, headers, exchange)
        else:
            answer = await http.post(url, json=body, headers=headers)
            answer.raise_for_status()
            said = answer.json()
            exchange.cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
            exchange.output = said["choices"][0]["token_ids"]
        exchange.ended = monotonic()
        self.exchanges.append(exchange)
        if exchange.cached not in {None, exchange.foretold}:
            exchange.evidence = await evidence(http, self.service, self.scope, exchange, self.log)
        report = {} if exchange.cached is None else {"cached_tokens": exchange.cached}
        path = f"{self.service}/reservations/{reservation}/prefill_complete"
        await self._report(http.post(path, json=report), "prefill_complete")

    async def _ask_and_leave(
        self,
        http: httpx.AsyncClient,
        url: str,
        body: dict[str, Any],
        headers: Mapping[str, str],
        exchange: Exchange,
    ) -> None:
        """Stream an answer that could become long, and close the connection on the way."""
        self.cancelled += 1
        wanted = self.rng.randint(1, 2 * self.output_tokens)
        body |= {"max_tokens": 400, "stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", url, json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                said = httpx.Response(200, content=line.removeprefix("data: ")).json()
                for choice in said["choices"]:
                    exchange.output += choice.get("token_ids") or []
                if len(exchange.output) >= wanted:
                    break

    async def _free(self, http: httpx.AsyncClient, reservation: str) -> None:
        await self._report(http.delete(f"{self.service}/reservations/{reservation}"), "free")

    async def _report(self, call: Any, name: str) -> None:
        answer = await call
        if answer.status_code != 200:
            self.errors[f"{name}: {answer.status_code}"] += 1
