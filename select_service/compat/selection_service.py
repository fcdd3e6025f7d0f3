"""`SelectionService` with the calls of Dynamo's Python binding, version 1.6, over our driver.

It translates and decides nothing: `dictionaries.py` has the requests and answers, `errors.py` the
errors, `loop_owner.py` the way to the event loop. `deploy/MIGRATION.md` lists the differences.
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
import os
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from indexer.errors import IndexerError
from select_service.compat.dictionaries import (
    begun_blocks,
    loads_dict,
    overlap_dict,
    pending_selection,
    read,
    ready_dict,
    reservation_dict,
    reservation_request,
    reserving_request,
    select_request,
    selection_dict,
    worker_dict,
)
from select_service.compat.dynamo_errors import SelectionServiceError, dynamo_error
from select_service.compat.loop_owner import LoopOwner
from select_service.compat.selection_cache import SelectionCache, SelectionCacheConfig
from select_service.core.pricing.policy import read_policy
from select_service.edge.construction import create_driver
from select_service.errors import PeerNotFound, ServiceError, scope_text
from select_service.settings import Settings, read_environment
from select_service.types import (
    OverlapScoresRequest,
    PotentialLoadsRequest,
    PromptFields,
    ReservationRequest,
    WorkerPatch,
    WorkerSpec,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from indexer.types import Scope
    from select_service.edge.driver.driver import Driver
    from select_service.types import Outcome, SelectRequest

_log = logging.getLogger("select_service")

T = TypeVar("T")
Dictionary = dict[str, Any]

_U64_MAX: Final = (1 << 64) - 1
_SESSION_TTL_MAX_S: Final = 31_536_000
_CAPACITY_UNKNOWN: Final = 10_000_000
"""Tokens; what an advisory says of a worker without `max_num_batched_tokens`."""


class SelectionService:
    """A selection service in this process, called as Dynamo's binding is.

    Built where an event loop runs, it lives on that loop; else on one in a thread of its own.
    Its methods may be called from any thread and loop. Those that return a future have begun when
    they return: it need not be awaited. Wrong arguments raise ValueError or TypeError at once,
    all other refusals are `SelectionServiceError`.
    """

    def __init__(
        self,
        *,
        indexer_threads: int = 4,
        indexer_peers: Sequence[str] | None = None,
        replica_sync_port: int | None = None,
        replica_sync_peers: Sequence[str] | None = None,
        selection_cache: SelectionCacheConfig | None = None,
        session_affinity_ttl_secs: int | None = None,
    ) -> None:
        """Build and start the service; weights are read from `DYN_*` variables, as there.

        Args:
            indexer_threads: accepted; one event loop does everything.
            indexer_peers: base URLs of services whose index is fetched first.
            replica_sync_port: where reservations are published to replicas; None: nowhere.
            replica_sync_peers: `tcp://host:port` of the replicas to listen to.
            selection_cache: bounds of selections that `create_reservation` finds by id.
            session_affinity_ttl_secs: seconds of silence after which a session may go elsewhere;
                None: sessions are off.

        Raises:
            ValueError, OverflowError, TypeError: an argument makes no sense.
        """
        if operator.index(indexer_threads) < 0:
            raise OverflowError("can't convert negative int to unsigned")
        if replica_sync_peers and replica_sync_port is None:
            raise ValueError("replica_sync_peers requires replica_sync_port")
        ttl_s = session_affinity_ttl_secs
        if ttl_s is not None and not 1 <= ttl_s <= _SESSION_TTL_MAX_S:
            raise ValueError("session_affinity_ttl_secs must be between 1 and 31536000")
        if selection_cache is not None and not isinstance(selection_cache, SelectionCacheConfig):
            raise TypeError("argument 'selection_cache' is no SelectionCacheConfig")
        self._cache = SelectionCache(selection_cache or SelectionCacheConfig())
        self._is_shut_down = False
        settings = _settings(indexer_peers or (), replica_sync_port, float(ttl_s or 0))
        self._tracks_prefill = settings.router_config.track_prefill_tokens
        self._driver = create_driver(settings)
        self._owner = LoopOwner()
        self._closing: asyncio.Future[None] | None = None
        start = _start(self._driver, replica_sync_peers or ())
        self._started = self._owner.start(start)
        weakref.finalize(self, _drop, self._owner, self._driver).atexit = False

    # -- workers ---------------------------------------------------------------------------------

    def upsert_worker(self, worker: Dictionary) -> asyncio.Future[Dictionary]:
        """Put a worker into the catalog and follow its KV events; return its record."""
        spec = read("worker", worker, WorkerSpec)
        return self._begin(lambda: worker_dict(self._driver.upsert_worker(spec)), is_new=True)

    def patch_worker(self, worker_id: int, patch: Dictionary) -> asyncio.Future[Dictionary]:
        """Change the members given; return the worker's record."""
        number, change = _worker_id(worker_id), read("patch", patch, WorkerPatch)
        return self._begin(
            lambda: worker_dict(self._driver.patch_worker(number, change)), is_new=True
        )

    def delete_worker(self, worker_id: int) -> asyncio.Future[Dictionary]:
        """Remove a worker with its load and index; return its last record."""
        number = _worker_id(worker_id)
        return self._begin(lambda: worker_dict(self._driver.delete_worker(number)))

    def list_workers(
        self, *, model_name: str | None = None, routing_group: str | None = None
    ) -> list[Dictionary]:
        """Return the records of workers, by id."""
        return self._now(
            lambda: [worker_dict(one) for one in self._driver.workers(model_name, routing_group)]
        )

    def ready(self) -> Dictionary:
        """Return `ready`, `schedulable_workers` and the records of all `workers`."""
        return self._now(lambda: ready_dict(self._driver.ready(), is_shut_down=self._is_shut_down))

    # -- selections ------------------------------------------------------------------------------

    def select(self, request: Dictionary) -> asyncio.Future[Dictionary]:
        """Choose a worker and book nothing. With a `selection_id`, it may be reserved by that."""
        asked = select_request(request)
        is_advisory = bool(request.get("advisory"))

        async def choose() -> Dictionary:
            answer = await self._driver.select(asked)
            selection = selection_dict(answer)
            if "worker_id" in selection:
                selection |= self._outlook(asked, selection, is_advisory=is_advisory)
                if asked.selection_id is not None:
                    self._cache.keep(self._booking(asked, selection), time.monotonic())
            return selection

        return self._run(choose, is_new=True)

    def select_and_reserve(self, request: Dictionary) -> asyncio.Future[Dictionary]:
        """Choose a worker and book the request there, under its `selection_id`."""
        asked = reserving_request(request)

        async def choose() -> Dictionary:
            return selection_dict(await self._driver.select_and_reserve(asked))

        return self._run(choose, is_new=True)

    def create_reservation(self, request: Dictionary) -> asyncio.Future[Dictionary]:
        """Book a request at the worker given, or at that of an earlier `select` of the same id."""
        pending = pending_selection(request)
        explicit = reservation_request(request) if pending is None else None

        def book() -> Dictionary:
            asked = explicit
            if pending is not None:
                asked = self._selected(*pending)
            assert asked is not None
            if pending is None:
                self._cache.drop(asked.scope, asked.reservation_id)
            answer = reservation_dict(self._driver.reserve(asked))
            self._cache.drop(asked.scope, asked.reservation_id)
            return answer

        return self._begin(book, is_new=True)

    # -- the life of a reservation ---------------------------------------------------------------

    def prefill_complete(self, selection_id: str) -> asyncio.Future[tuple[()]]:
        """Report that the prompt is computed."""
        name = _text("selection_id", selection_id)

        def report() -> tuple[()]:
            self._driver.prefill_complete(name)
            return ()

        return self._begin(report)

    def add_output_block(self, selection_id: str, *, decay_fraction: float | None = None) -> None:
        """Report one more block of output, which weighs `decay_fraction` (0 to 1)."""
        name = _text("selection_id", selection_id)
        if decay_fraction is not None and not 0.0 <= decay_fraction <= 1.0:
            raise ValueError("decay_fraction must be between 0.0 and 1.0")
        self._now(lambda: self._driver.output_block(name, decay_fraction))

    def free_reservation(
        self, selection_id: str, *, outcome: Outcome | None = None
    ) -> asyncio.Future[tuple[()]]:
        """End a reservation; how, only this service takes: `completed`, `failed`, `cancelled`."""
        name = _text("selection_id", selection_id)

        def free() -> tuple[()]:
            self._driver.free(name, outcome=outcome)
            return ()

        return self._begin(free)

    # -- what can be looked at -------------------------------------------------------------------

    def loads(
        self, *, model_name: str | None = None, routing_group: str | None = None
    ) -> list[Dictionary]:
        """Return the load of every rank, by model and group."""
        return self._now(
            lambda: [loads_dict(one) for one in self._driver.loads(model_name, routing_group)]
        )

    def potential_loads(self, request: Dictionary) -> asyncio.Future[list[Dictionary]]:
        """Return what every rank would carry with this prompt."""
        asked = read("request", request, PotentialLoadsRequest)
        return self._begin(
            lambda: [msgspec.to_builtins(row) for row in self._driver.potential_loads(asked)]
        )

    def overlap_scores(self, request: Dictionary) -> asyncio.Future[Dictionary]:
        """Return the blocks of this prompt that every rank has."""
        asked = read("request", request, OverlapScoresRequest)
        return self._begin(lambda: overlap_dict(self._driver.overlap_scores(asked)))

    def indexer_snapshot(self) -> asyncio.Future[Dictionary]:
        """Return the index as `GET /dump` does."""

        async def collect() -> Dictionary:
            pieces = [piece async for piece in self._driver.dump()]
            snapshot: Dictionary = msgspec.json.decode(b"".join(pieces))
            return snapshot

        return self._run(collect)

    def recover_indexer_from_peers(self, peers: Sequence[str]) -> asyncio.Future[bool]:
        """Fill the index from the first peer (base URL) that answers; return whether one did."""
        urls = [_text("peers", one) for one in peers]
        return self._run(lambda: self._driver.recover_from(urls))

    # -- replicas --------------------------------------------------------------------------------

    def list_replica_peers(self) -> list[str]:
        """Return the endpoints of the replicas that are listened to."""

        def peers() -> list[str]:
            plane = self._driver.replicas
            return [] if plane is None else sorted(plane.peers())

        return self._now(peers)

    def register_replica_peer(self, endpoint: str) -> asyncio.Future[bool]:
        """Listen to another replica; return whether it is new."""
        place = _text("endpoint", endpoint)
        return self._begin(lambda: self._driver.register_peer(place))

    def deregister_replica_peer(self, endpoint: str) -> asyncio.Future[bool]:
        """Listen to a replica no longer; return whether it was listened to."""
        place = _text("endpoint", endpoint)

        def forget() -> bool:
            try:
                self._driver.deregister_peer(place)
            except PeerNotFound:
                return False
            return True

        return self._begin(forget)

    # -- the end ---------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Refuse what waits and what comes, and close sockets. Repeatable, waits for nothing."""
        self._is_shut_down = True
        self._now(self._close)

    def shutdown_async(self) -> asyncio.Future[tuple[()]]:
        """Do the same, and wait until it is done."""
        self._is_shut_down = True

        async def close() -> tuple[()]:
            await self._close()
            return ()

        return self._run(close)

    def _close(self) -> asyncio.Future[None]:
        if self._closing is None:
            self._closing = self._owner.keep(_stop(self._started, self._driver))
        return self._closing

    # -- how calls get to the loop ---------------------------------------------------------------

    def _now(self, function: Callable[[], T]) -> T:
        with _errors():
            return self._owner.call(function)

    def _begin(self, function: Callable[[], T], *, is_new: bool = False) -> asyncio.Future[T]:
        async def carry_out() -> T:
            return function()

        return self._run(carry_out, is_new=is_new)

    def _run(
        self, work: Callable[[], Coroutine[Any, Any, T]], *, is_new: bool = False
    ) -> asyncio.Future[T]:
        """Begin work on the loop; after a shutdown, none that asks for something new."""

        async def carry_out() -> T:
            with _errors():
                await asyncio.shield(self._started)
                if is_new and self._is_shut_down:
                    raise SelectionServiceError(
                        "selection service is shutting down", "not_ready", 503, "shutting_down"
                    )
                return await work()

        with _errors():
            return self._owner.submit(carry_out())

    # -- pending selections ----------------------------------------------------------------------

    def _booking(self, asked: SelectRequest, selection: Dictionary) -> ReservationRequest:
        """Return what reserves a selection later."""
        prompt = {name: getattr(asked, name) for name in PromptFields.__struct_fields__}
        override = asked.router_config_override
        tracks = None if override is None else override.track_prefill_tokens
        if tracks is None:
            tracks = self._tracks_prefill
        assert asked.selection_id is not None
        return ReservationRequest(
            reservation_id=asked.selection_id,
            worker_id=selection["worker_id"],
            dp_rank=selection["dp_rank"],
            expected_output_tokens=asked.expected_output_tokens,
            effective_prefill_tokens=selection["effective_prefill_tokens"] if tracks else 0,
            **prompt,
        )

    def _selected(self, scope: Scope, name: str) -> ReservationRequest:
        """Return the booking of a pending selection."""
        found = self._cache.find(scope, name, time.monotonic())
        if found is None:
            raise SelectionServiceError(
                f"no pending selection {name} for {scope_text(scope)} "
                "(expired, already used, or never selected)",
                "not_found",
                404,
                "reservation_not_found",
            )
        return found

    def _outlook(
        self, asked: SelectRequest, selection: Dictionary, *, is_advisory: bool
    ) -> Dictionary:
        """Return what the chosen rank would carry, and on request what it carries now."""
        prompt = {name: getattr(asked, name) for name in PromptFields.__struct_fields__}
        rows = self._driver.potential_loads(PotentialLoadsRequest(**prompt))
        place = selection["worker_id"], selection["dp_rank"]
        more: Dictionary = {}
        for row in rows:
            if (row.worker_id, row.dp_rank) == place:
                begun = begun_blocks(asked, selection["block_size"])
                more["potential_decode_blocks"] = row.potential_decode_blocks + begun
        if is_advisory:
            (scope,) = self._driver.loads(asked.scope.model_name, asked.scope.tenant_id)
            busy = {(one.worker_id, one.dp_rank): one for one in scope.loads}[place]
            (most,) = (
                one.max_num_batched_tokens
                for one in self._driver.workers(*asked.scope)
                if one.worker_id == selection["worker_id"]
            )
            more["worker_load"] = {
                "active_prefill_tokens": busy.potential_prefill_tokens,
                "prefill_token_capacity": _CAPACITY_UNKNOWN if most is None else most,
            }
        return more


def _settings(indexer_peers: Sequence[str], port: int | None, session_ttl_s: float) -> Settings:
    """Return what Dynamo 1.6 starts with: no queue unless a variable asks for one."""
    if port == 0:
        raise ValueError("replica sync port must be greater than zero")
    router = read_environment(os.environ)
    for warning in router.warnings:
        _log.warning("%s", warning)
    if "DYN_ROUTER_QUEUE_THRESHOLD" not in os.environ:
        config = msgspec.structs.replace(router.config, queue_threshold=math.inf)
        router = msgspec.structs.replace(router, config=config)
    file = router.policy
    if file is not None:
        if file.text is None:
            raise ValueError(file.error)
        read_policy(file.text, file.path, router.config.queue_threshold)
    return Settings(
        router=router,
        indexer_peers=tuple(indexer_peers),
        replica_sync_port=port,
        session_ttl_s=session_ttl_s,
    )


async def _start(driver: Driver, replicas: Sequence[str]) -> None:
    await driver.start()
    for endpoint in replicas:
        driver.register_peer(endpoint)


async def _stop(started: asyncio.Future[None], driver: Driver) -> None:
    await asyncio.wait([started])
    await driver.close()


def _drop(owner: LoopOwner, driver: Driver) -> None:
    """Close what is no longer held."""
    owner.finish(driver.close)


@contextmanager
def _errors() -> Iterator[None]:
    """Raise our errors as those of the binding."""
    try:
        yield
    except ServiceError as error:
        raise dynamo_error(error) from error
    except IndexerError as error:
        raise SelectionServiceError(str(error), "scheduler", 500) from error


def _worker_id(value: object) -> int:
    number = operator.index(value)  # type: ignore[arg-type]
    if not 0 <= number <= _U64_MAX:
        raise OverflowError(f"worker_id {number} is no unsigned number of 64 bits")
    return number


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"argument '{name}' must be a string, not {type(value).__name__}")
    return value
