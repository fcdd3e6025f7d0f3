"""Which workers serve which model, as the service lists them, and the adapters that engines name.

Read again when it is needed and old; what was read last is kept while no selector answers.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import httpx
import msgspec
from msgspec import Struct

from select_service.client import ClientError, ServiceError
from select_service.tokenization.engine_tokenizer import engine_url
from select_service.tokenization.openai_body import NAMELESS, model_to_serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from select_service.client import AsyncClient
    from select_service.gateway.options import GatewayOptions, GatewayTraffic
    from select_service.types import WorkerRecord

_OK: Final = 200


class ModelTarget(NamedTuple):
    """Where a request is placed."""

    model_name: str
    lora_name: str | None


class _Model(Struct):
    id: str
    parent: str | None = None


class _Models(Struct):
    data: list[msgspec.Raw]


class FleetCatalog:
    """The workers of one tenant, by model."""

    def __init__(
        self,
        client: AsyncClient,
        http: httpx.AsyncClient,
        tenant_id: str,
        options: GatewayOptions,
        traffic: GatewayTraffic,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._http = http
        self._tenant_id = tenant_id
        self._options = options
        self._traffic = traffic
        self._clock = clock
        self._workers: dict[str, list[WorkerRecord]] = {}
        self._workers_at = self._models_at = float("-inf")
        self._adapters: dict[str, str] = {}  # with the partition of their workers
        self._listed: dict[str, msgspec.Raw] = {}
        self._reading, self._asking = asyncio.Lock(), asyncio.Lock()

    async def read(self) -> None:
        """Read the list of workers again if it is old; one call at a time does."""
        if self._is_fresh(self._workers_at) or (self._reading.locked() and self._workers):
            return
        async with self._reading:
            if self._is_fresh(self._workers_at):
                return
            try:
                records = await self._client.workers()
            except (ServiceError, ClientError):
                self._traffic.catalog_failures += 1
            else:
                found = defaultdict(list)
                for one in records:
                    if one.tenant_id == self._tenant_id and one.lifecycle == "schedulable":
                        found[one.model_name].append(one)
                self._workers = dict(found)
            self._workers_at = self._clock()

    async def target(self, model: str | None) -> ModelTarget:
        """Return where a request for a model, or for an adapter, is placed."""
        await self.read()
        if model is not None and model not in self._workers:
            await self._read_models()
            base = self._options.adapters.get(model) or self._adapters.get(model)
            if base is not None:
                return ModelTarget(base if base in self._workers else NAMELESS, model)
        chosen = model_to_serve(model, self._workers.__contains__, self._workers.keys)
        return ModelTarget(chosen, None)

    def block_size(self, target: ModelTarget) -> int:
        """Return the block size of the workers of a target; 1: none is known."""
        return next((one.block_size or 1 for one in self._workers.get(target.model_name, ())), 1)

    def engines(self, target: ModelTarget) -> Sequence[str]:
        """Return the base URLs of the workers of a target."""
        return [
            engine_url(one.endpoint)
            for one in self._workers.get(target.model_name, ())
            if one.endpoint
        ]

    def others(self, target: ModelTarget, failed: set[int]) -> list[int]:
        """Return the workers of a target but those that have failed."""
        ids = (one.worker_id for one in self._workers.get(target.model_name, ()))
        return [one for one in ids if one not in failed]

    async def models(self) -> list[msgspec.Raw]:
        """Return what the engines list at /v1/models, each model once."""
        await self.read()
        await self._read_models()
        return list(self._listed.values())

    async def _read_models(self) -> None:
        if self._is_fresh(self._models_at) or (self._asking.locked() and self._listed):
            return
        async with self._asking:
            if self._is_fresh(self._models_at):
                return
            adapters: dict[str, str] = {}
            listed: dict[str, msgspec.Raw] = {}
            for model_name in list(self._workers):
                for raw in await self._models_of(ModelTarget(model_name, None)):
                    one = msgspec.json.decode(raw, type=_Model)
                    listed.setdefault(one.id, raw)
                    if one.parent is not None:
                        adapters[one.id] = model_name
            self._adapters, self._listed = adapters, listed
            self._models_at = self._clock()

    def _is_fresh(self, read_at: float) -> bool:
        return self._clock() - read_at < self._options.catalog_refresh_s

    async def _models_of(self, target: ModelTarget) -> list[msgspec.Raw]:
        """Return what one engine of a target lists; its name alone if none answers."""
        for engine in self.engines(target)[: self._options.engines_max]:
            try:
                async with asyncio.timeout(self._options.connect_timeout_s):
                    answer = await self._http.get(f"{engine}/v1/models")
                if answer.status_code == _OK:
                    found = msgspec.json.decode(answer.content, type=_Models).data
                    for raw in found:
                        msgspec.json.decode(raw, type=_Model)
                    return found
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, msgspec.MsgspecError):
                continue
        named = {"id": target.model_name, "object": "model", "owned_by": "select-service"}
        return [msgspec.Raw(msgspec.json.encode(named))]
