"""A replica of a Serve deployment as a worker: registers itself and reports its prompts.

Given addresses of selectors, it registers with each of them periodically, so that a restarted one
learns of it, too. Otherwise it reports at the meeting point, which every selector of
`select_service.serve_ray` follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from select_service.client.asynchronous import AsyncClient
from select_service.client.core.options import Options
from select_service.client.core.problems import ClientError
from select_service.client.ray.client_pool import client_pool_for
from select_service.client.ray.registry import BEAT_S, NAMESPACE, SelectorRegistry
from select_service.errors import ServiceError
from select_service.types import WorkerSpec
from select_service.types.reservations import BatchPrefillComplete

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

_log = logging.getLogger("select_service.client")

_REGISTER_S: Final = 5.0
"""Interval of registration at selectors with addresses: a restarted one is without us for that
long. Also the longest wait for one of them."""

_GATHER_S: Final = 0.002
"""How long reports about prompts are collected."""

_REPORTED_MAX: Final = 256
"""Reports per request."""

_WAITING_MAX: Final = 65_536
"""Prompts that may wait to be reported; the oldest are dropped: their reservations end anyway."""

_TRIES: Final = 4
_AGAIN_S: Final = 0.05
"""Wait before a retry: a reservation booked at another selector may be unknown for a moment."""

_GONE: Final = 404


class Replica(msgspec.Struct, frozen=True):
    """The replica that serves; by default what Serve reports for the current one."""

    unique_id: str
    app: str
    deployment: str


class ServeWorker:
    """`worker = ServeWorker(block_size=16, kv_events_endpoint=…)`, `await worker.start()`.

    In a deployment's asynchronous `__init__`; `await worker.aclose()` in its `__del__`. A killed
    replica is forgotten within seconds; at selectors with addresses it stays, but a router never
    offers it.
    """

    def __init__(
        self,
        *,
        selectors: Sequence[str] | None = None,
        namespace: str = NAMESPACE,
        replica: Replica | None = None,
        client: Options | None = None,
        request_id: Callable[[], str | None] | None = None,
        **spec: Any,
    ) -> None:
        """Report nothing yet.

        Args:
            selectors: their addresses; None: all of `select_service.serve_ray`.
            namespace: of those.
            replica: the name of this one.
            client: options of the clients.
            request_id: returns Serve's id of the request being served; default: Ray's own.
            spec: fields of `WorkerSpec`: `block_size`, `model_name`, `kv_events_endpoint` and so
                on. `worker_id`, `endpoint` (`ray://…`) and `stable_routing_id` are derived from the
                replica's id.

        Raises:
            msgspec.ValidationError: a field is invalid.
        """
        self.replica = replica or _replica_here()
        defaults = {
            "worker_id": worker_id_of(self.replica.unique_id),
            "endpoint": f"ray://{self.replica.unique_id}",
            "stable_routing_id": self.replica.unique_id,
        }
        self.spec = msgspec.convert({**defaults, **spec}, WorkerSpec)
        if unknown := spec.keys() - set(WorkerSpec.__struct_fields__):
            raise TypeError(f"no fields of a worker: {', '.join(sorted(unknown))}")
        self._selectors = selectors
        self._namespace = namespace
        self._options = client or Options()
        self._request_id = request_id or _request_here
        self._meeting = SelectorRegistry(namespace) if selectors is None else None
        self._registrars = [AsyncClient(one, options=self._options) for one in (selectors or ())]
        self._prefilled: dict[str, int | None] = {}
        self._has_reports = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._show = _shown_by_ray(self.replica.deployment)
        self.failures = 0  # failed attempts to register or to report
        self.not_told = 0  # prompts that could not be reported

    @property
    def worker_id(self) -> int:
        """The id under which the selectors know it."""
        return self.spec.worker_id

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Register, and keep doing so. Selectors that are down learn of it once they are back."""
        await self._register()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(one()) for one in (self._stay, self._report_all)]

    async def aclose(self) -> None:
        """Remove it from the catalogs. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not tasks:
            return
        with contextlib.suppress(Exception):  # unreachable selectors need not know
            if self._meeting is not None:
                await self._meeting.leave(worker_id=self.worker_id)
        for client in self._registrars:
            with contextlib.suppress(ServiceError, ClientError):
                await client.delete_worker(self.worker_id)
            await client.aclose()

    def prefill_complete(
        self, cached_tokens: int | None = None, reservation_id: str | None = None
    ) -> None:
        """Report the first token of the request being served. Does not block.

        Args:
            cached_tokens: how much of the prompt the engine had cached, if it reports that.
            reservation_id: of the request; default: that of the running one (several calls on
                behalf of one request must be distinguished: `selection_keyword` of the router).
        """
        name = reservation_id
        if name is None:
            request = self._request_id()
            if request is None:
                return
            name = reservation_id_of(self.replica.app, self.replica.deployment, request)
        if len(self._prefilled) >= _WAITING_MAX:
            del self._prefilled[next(iter(self._prefilled))]
            self._left_out(1)
        self._prefilled[name] = cached_tokens
        self._has_reports.set()

    # -- behind ------------------------------------------------------------------------------------

    async def _stay(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S if self._meeting is not None else _REGISTER_S)
            await self._register()

    async def _register(self) -> None:
        if self._meeting is not None:
            members = {
                name: one for name, one in msgspec.to_builtins(self.spec).items() if one is not None
            }
            await self._try(self._meeting.worker(members))
        tellings = (self._try(client.upsert_worker(self.spec)) for client in self._registrars)
        await asyncio.gather(*tellings)

    async def _try(self, call: Coroutine[Any, Any, object]) -> None:
        try:
            async with asyncio.timeout(_REGISTER_S):
                await call
        except Exception as error:  # noqa: BLE001 - a replica must serve even if unregistered
            if not self.failures:
                _log.warning("worker %d is not registered: %r", self.worker_id, error)
            self._failed()

    async def _report_all(self) -> None:
        client_pool = client_pool_for(self._selectors, self._namespace, self._options)
        while True:
            await self._has_reports.wait()
            await asyncio.sleep(_GATHER_S)
            self._has_reports.clear()
            prompts, self._prefilled = self._prefilled, {}
            names = list(prompts)
            for at in range(0, len(names), _REPORTED_MAX):
                part = {name: prompts[name] for name in names[at : at + _REPORTED_MAX]}
                self._left_out(len(await self._report(client_pool.client, part)))

    async def _report(
        self, client: AsyncClient | None, prompts: dict[str, int | None]
    ) -> dict[str, int | None]:
        """Report, and return what no selector knew; what has ended was received all the same."""
        for tries in range(_TRIES):
            if client is None:
                break
            if tries:
                await asyncio.sleep(_AGAIN_S * tries)
            try:
                prompts = await _batch(client, prompts)
            except (ServiceError, ClientError):
                self._failed()
            if not prompts:
                break
        return prompts

    def _failed(self) -> None:
        self.failures += 1
        self._show("failed", 1)

    def _left_out(self, prompts: int) -> None:
        if prompts:
            self.not_told += prompts
            self._show("not_told", prompts)


async def _batch(client: AsyncClient, prompts: dict[str, int | None]) -> dict[str, int | None]:
    results = await client.batch(
        [
            BatchPrefillComplete(reservation_id=name, cached_tokens=cached)
            for name, cached in prompts.items()
        ]
    )
    return {
        name: cached
        for (name, cached), one in zip(prompts.items(), results, strict=True)
        if one.status == _GONE and one.ended is not True
    }


def _shown_by_ray(deployment: str) -> Callable[[str, int], None]:
    """Return a callback that counts failures in Ray's metrics; a no-op outside of Ray."""
    if "ray" not in sys.modules:
        return lambda _, __: None
    from ray.util.metrics import Counter

    counter = Counter(
        "select_service_worker_troubles",
        "failed: attempts to register or to report; not_told: prompts that could not be reported.",
        ("deployment", "what"),
    )
    counter.set_default_tags({"deployment": deployment})
    return lambda what, count: counter.inc(count, {"what": what})


def _replica_here() -> Replica:
    from ray import serve  # the extra `ray`

    context = serve.get_replica_context()
    return Replica(context.replica_tag, context.app_name, context.deployment)


def _request_here() -> str | None:
    """Return Serve's id of the running request; Serve has no public API for it."""
    from ray.serve import context

    try:
        return context._get_serve_request_context()._internal_request_id or None  # noqa: SLF001
    except AttributeError:
        return None


@lru_cache(maxsize=16_384)
def worker_id_of(replica: str) -> int:
    """Return the 64-bit worker id of a replica by its unique id (`replica_tag` in its context).

    It equals the id that Ray Serve LLM computes, so both may refer to the same worker.
    """
    return int.from_bytes(blake2b(replica.encode(), digest_size=8).digest(), "big")


def reservation_id_of(app: str, deployment: str, request: str) -> str:
    """Return the id under which a request is booked.

    The router and the replica that serves the request both know the three arguments, so nothing has
    to be passed from one to the other.

    Args:
        app: application of the deployment.
        deployment: the deployment whose replica serves the request.
        request: Serve's internal request id, shared by all calls on behalf of one request.
    """
    return f"{app}:{deployment}:{request}"
