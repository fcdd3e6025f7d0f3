"""For Ray Serve: a request router that asks the service, and a replica's side of it.

    @serve.deployment(
        request_router_config=RequestRouterConfig(
            request_router_class="select_service.client.ray.request_router:SelectServiceRouter",
            request_router_kwargs={"model_name": "llama"},
        )
    )

Needs the extra `ray`. The logic is in `routing.py`; here is only what depends on Serve's API.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import weakref
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from ray.exceptions import TaskCancelledError
from ray.serve.request_router import LocalityMixin, MultiplexMixin, RequestRouter
from ray.util.metrics import Counter

from select_service.client.core.options import Options
from select_service.client.ray.client_pool import client_pool_for
from select_service.client.ray.registry import NAMESPACE
from select_service.client.ray.routing import Routing, RoutingOptions
from select_service.client.ray.serve_worker import ServeWorker, reservation_id_of, worker_id_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from select_service.client.ray.routing import PendingCall, RoutedRequest
    from select_service.types import Outcome

__all__ = ["SelectServiceRouter", "ServeWorker", "worker_id_of"]

_OWN: Final = frozenset(RoutingOptions.__struct_fields__)
_TWO: Final = 2


class _Seen(NamedTuple):
    """A request that has been sent to the service, and may be routed again."""

    request: weakref.ref[Any]
    ticket: RoutedRequest


class SelectServiceRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """Sends every request to the replica the selection service prefers, the others as fallback.

    Requests without a readable prompt, and all requests while no selector answers, are routed by
    Serve's own power of two choices.
    """

    max_num_routing_tasks_cap = 512  # the tasks wait for the selector and probe no replica

    def initialize_state(
        self,
        selectors: Sequence[str] | None = None,
        namespace: str = NAMESPACE,
        tokenizer: str | None = None,
        client: dict[str, Any] | None = None,
        **options: object,
    ) -> None:
        """Read `request_router_kwargs`.

        Args:
            selectors: their addresses, as for `AsyncClient`; None: those of
                `select_service.serve_ray` in this cluster, as they come and go.
            namespace: of that.
            tokenizer: `module:function` that tokenizes a request with text (an OpenAI body); an
                alternative to overriding `tokenize`.
            client: fields of `select_service.client.Options`.
            options: `model_name`, `tenant_id`; `timeout_ms` (250): longest wait for a selector,
                after which Serve chooses; `pause_s` (1): and continues to, before the next request
                waits; `ranked_max` (64): candidates that are ranked one by one, beyond that only
                the best one is; `selection_keyword` (none): a call with this keyword
                (`selection=None`) gets it filled with `reservation_id`, `worker_id`, `dp_rank` and
                `cached_tokens`.

        Raises:
            msgspec.ValidationError, TypeError: an argument is invalid.
        """
        if unknown := options.keys() - _OWN:
            raise TypeError(f"no arguments of this router: {', '.join(sorted(unknown))}")
        self._routing_options = msgspec.convert(options, RoutingOptions)
        self._client_options = msgspec.convert(client or {}, Options)
        self._selectors = selectors
        self._namespace = namespace
        self._tokenizer: Any = self.tokenize
        if tokenizer is not None:
            module, _, name = tokenizer.partition(":")
            self._tokenizer = getattr(import_module(module), name)
        elif type(self).tokenize is SelectServiceRouter.tokenize:
            self._tokenizer = None
        self._routing: Routing | None = None
        self._seen: dict[int, _Seen] = {}  # by identity of the request
        self._choices = Counter(
            "select_service_router_choices",
            description="Choices of replicas, by what became of them.",
            tag_keys=("deployment", "outcome"),
        )
        self._choices.set_default_tags({"deployment": self._deployment_id.name})

    def tokenize(self, payload: object) -> Sequence[int] | None:
        """Return the tokens of a request with text; to be overridden, may be a coroutine.

        Args:
            payload: the argument with `messages` or `prompt`: a model, a namespace or a dict.
        """
        return None

    @property
    def max_num_routing_tasks(self) -> int:
        """Serve's own bound, two per replica, is meant for probing replicas."""
        return self.max_num_routing_tasks_cap

    @property
    def choices(self) -> dict[str, int]:
        """Choices so far, by outcome."""
        return {} if self._routing is None else dict(self._routing.counts)

    # -- what Serve calls --------------------------------------------------------------------------

    async def choose_replicas(
        self,
        candidate_replicas: list[Any],
        pending_request: Any | None = None,
    ) -> list[list[Any]]:
        """Return groups of replicas, best first; Serve takes one that has room."""
        if pending_request is None or not candidate_replicas:
            return self._two(candidate_replicas, pending_request)
        pending_request.routing_context.should_backoff = True
        ranked = None
        try:
            ranked = await self._ranked(candidate_replicas, pending_request)
        except Exception:  # noqa: BLE001 - one that raises ends the routing of its deployment
            self._count("error")
        return ranked or self._two(candidate_replicas, pending_request)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Note that a replica has taken the request, so its end will be reported, however late."""
        super().on_request_routed(pending_request, replica_id, result)
        seen = self._seen.get(id(pending_request))
        routing = self._routing
        if routing is not None and seen is not None and seen.request() is pending_request:
            routing.taken(seen.ticket)
            if result is not None:
                loop = asyncio.get_running_loop()
                note = partial(_note_outcome, loop, routing, seen.ticket)  # in any thread
                result.add_done_callback(note)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """End the booking of a completed request."""
        super().on_request_completed(replica_id, internal_request_id)
        if self._routing is not None:
            # a turn later: how it ended is reported right after this, and has to be sent along
            worker_id = worker_id_of(replica_id.unique_id)
            end = self._routing.completed
            asyncio.get_running_loop().call_soon(end, internal_request_id, worker_id)

    # -- behind ------------------------------------------------------------------------------------

    async def _ranked(self, replicas: list[Any], pending: Any) -> list[list[Any]] | None:
        routing = self._routing_here()
        before = self._seen.pop(id(pending), None)
        if before is not None and before.request() is pending:
            await routing.drop_now(before.ticket)  # no replica had room, or one has refused it
        adapter = pending.metadata.multiplexed_model_id
        if adapter:
            wanted = self.apply_multiplex_routing(pending_request=pending)
            replicas = [one for one in replicas if one.replica_id in wanted] or replicas
        replicas = self.select_available_replicas(replicas) or replicas
        by_worker = {worker_id_of(one.replica_id.unique_id): one for one in replicas}
        where, request = self._deployment_id, pending.metadata.internal_request_id
        name = reservation_id_of(where.app_name, where.name, request)
        found = await routing.rank(pending, name, list(by_worker), adapter)
        if found is None:
            return None
        ticket, groups = found
        self._follow(routing, ticket, pending, request)
        return [[by_worker[one] for one in group] for group in groups]

    def _routing_here(self) -> Routing:
        """Return this loop's routing, created lazily: Serve creates the router on another loop."""
        if self._routing is None:
            client_pool = client_pool_for(self._selectors, self._namespace, self._client_options)
            self._routing = Routing(
                client_pool, self._routing_options, self._tokenizer, on_choice=self._count
            )
        return self._routing

    def _follow(
        self, routing: Routing, ticket: RoutedRequest, pending: PendingCall, request: str
    ) -> None:
        """Watch where the request goes; free its booking if it goes nowhere."""
        key, loop = id(pending), asyncio.get_running_loop()

        def vanished() -> None:  # never dispatched; may be called in any thread
            with contextlib.suppress(RuntimeError):  # the loop is closed as well
                loop.call_soon_threadsafe(self._vanished, routing, key, ticket)

        self._seen[key] = _Seen(weakref.ref(pending), ticket)
        weakref.finalize(pending, vanished).atexit = False
        pending.future.add_done_callback(partial(_settled, routing, ticket, request))

    def _vanished(self, routing: Routing, key: int, ticket: RoutedRequest) -> None:
        routing.abandoned(ticket)
        seen = self._seen.get(key)
        if seen is not None and seen.ticket is ticket:
            del self._seen[key]

    def _count(self, outcome: str) -> None:
        self._choices.inc(1, {"outcome": outcome})

    def _two(self, replicas: list[Any], pending: Any | None) -> list[list[Any]]:
        """Return two random replicas, of the nearest if possible; Serve takes the shorter queue."""
        if pending is not None and pending.metadata.multiplexed_model_id:
            wanted: Collection[Any] = self.apply_multiplex_routing(pending_request=pending)
        else:
            wanted = self.apply_locality_routing(pending_request=pending)
        among = [one for one in replicas if one.replica_id in wanted] or replicas
        if not among:
            return []
        return [random.sample(among, min(_TWO, len(among)))]


def _settled(
    routing: Routing, ticket: RoutedRequest, request: str, sent: asyncio.Future[Any]
) -> None:
    if sent.cancelled() or sent.exception() is not None:
        routing.drop(ticket, "cancelled")
    else:
        routing.routed(ticket, request, worker_id_of(sent.result().replica_id.unique_id))


def _note_outcome(
    loop: asyncio.AbstractEventLoop, routing: Routing, ticket: RoutedRequest, result: object
) -> None:
    """Note that the replica raised, or died; of a stream Serve only reports the latter."""
    if isinstance(result, TaskCancelledError):
        outcome: Outcome = "cancelled"
    elif isinstance(result, Exception):
        outcome = "failed"
    else:
        return
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(routing.note_outcome, ticket, outcome)
