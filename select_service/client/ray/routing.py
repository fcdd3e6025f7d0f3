"""The logic of a Ray Serve request router, without Ray: ranks replicas, books, frees.

A request is booked when it is ranked, under an id its replica also knows; the booking moves if
Serve sends the request to another replica than the best; and it is freed when Serve reports that
the request has ended or was never sent. Any failure results in `None`: Serve then chooses by
itself. `request_router.py` connects it to Serve.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter, deque
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec import UNSET, Struct

from select_service.client.core.problems import ClientError, TimedOut, Unreachable
from select_service.client.ray.request_prompt import read_prompt
from select_service.errors import NoEligibleWorker, NoSchedulableWorker, ReservationConflict

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from select_service.client.asynchronous import AsyncClient
    from select_service.client.ray.client_pool import ClientPool
    from select_service.client.ray.request_prompt import RequestPrompt
    from select_service.client.reservation import Reservation
    from select_service.types import Outcome

    Tokenizer = Callable[[Any], Sequence[int] | Awaitable[Sequence[int] | None] | None]

BOOKED_MAX_S: Final = 3600.0
"""Serve never reports the end of a choice that was not dispatched: it is freed after this time.
Requests that a replica has taken may last as long as they like."""

_FLUSH_S: Final = 0.5
"""Longest wait for the end of a booking that is about to be made again under its id."""

_REMEMBERED: Final = 65_536
"""Requests in flight in one router; beyond it the oldest is freed."""


class RoutingOptions(Struct, frozen=True, kw_only=True):
    """How a router asks; the keywords of `SelectServiceRouter`, which documents them."""

    model_name: str = "default"
    tenant_id: str = "default"
    timeout_ms: float = 250.0
    pause_s: float = 1.0
    ranked_max: int = 64
    selection_keyword: str | None = None

    def __post_init__(self) -> None:
        if self.timeout_ms <= 0 or self.pause_s < 0 or self.ranked_max < 0:
            raise ValueError("timeout_ms must be above 0, pause_s and ranked_max not below")


class PendingCall(Protocol):
    """The part of Serve's `PendingRequest` that is used."""

    args: list[Any]
    kwargs: dict[Any, Any]
    future: asyncio.Future[Any]


class RoutedRequest:
    """One request on its way through a router."""

    __slots__ = (
        "client",
        "fields",
        "has_name",
        "is_over",
        "is_routed",
        "name",
        "reservation",
        "since",
        "worker_id",
    )

    def __init__(self, name: str, fields: dict[str, Any], client: AsyncClient) -> None:
        self.name = name
        self.fields = fields
        self.client = client
        self.reservation: Reservation | None = None
        self.worker_id = 0  # where it goes
        self.since = monotonic()
        self.has_name = False  # booked under its own name rather than a generated id
        self.is_routed = False
        self.is_over = False


class Routing:
    """All requests of one router; used on one event loop."""

    def __init__(
        self,
        client_pool: ClientPool,
        options: RoutingOptions,
        tokenizer: Tokenizer | None = None,
        on_choice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Ask none yet.

        Args:
            client_pool: provides the client.
            options: how to ask.
            tokenizer: tokenizes a payload with text; may be a coroutine.
            on_choice: called with the outcome of a choice.
        """
        self._client_pool = client_pool
        self._options = options
        self._tokenizer = tokenizer
        self._on_choice = on_choice
        self._paused_until = 0.0
        self._under_way: dict[tuple[str, int], deque[RoutedRequest]] = {}  # by request and worker
        self._tickets: dict[RoutedRequest, None] = {}  # not over, oldest first
        self._untaken: dict[
            RoutedRequest, None
        ] = {}  # those of which the end may never be reported
        self._names: set[str] = set()  # in use by tickets
        self._moves: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        """Choices by outcome: `ranked`, or why Serve had to choose."""

    # -- choosing ----------------------------------------------------------------------------------

    async def rank(
        self, call: PendingCall, name: str, worker_ids: Sequence[int], adapter: str = ""
    ) -> tuple[RoutedRequest, list[list[int]]] | None:
        """Book the best of some workers, and rank the others behind it.

        Args:
            call: the request.
            name: the id to book under.
            worker_ids: the candidates.
            adapter: the adapter it runs under, if Serve knows it.

        Returns:
            The ticket, and groups of ids, best first; None if Serve has to choose.
        """
        self._fill_selection(call, None)  # left from a previous attempt
        try:
            return await self._rank(call, name, worker_ids, adapter)
        except TimedOut:
            self._pause("timeout")
        except Unreachable:
            self._pause("unreachable")
        except (NoEligibleWorker, NoSchedulableWorker):
            self._count("unknown_replicas")
        except ClientError:
            self._count("no_selector")
        except Exception:  # noqa: BLE001 - a router that raises stops the requests of its process
            self._count("error")
        return None

    async def _rank(
        self, call: PendingCall, name: str, worker_ids: Sequence[int], adapter: str
    ) -> tuple[RoutedRequest, list[list[int]]] | None:
        client = self._client_pool.client
        if client is None:
            self._count("no_selector")
            return None
        if client.degraded or monotonic() < self._paused_until:
            self._count("unreachable")
            return None
        fields = await self._prompt_of(call, adapter)
        if fields is None:
            self._count("no_prompt")
            return None
        ticket = RoutedRequest(name, fields, client)
        explain = 1 < len(worker_ids) <= self._options.ranked_max
        booked = await self._reserve(ticket, worker_ids, explain=explain)
        if booked.degraded:
            booked.free("cancelled")
            self._count("unreachable")
            return None
        self._hold(ticket, booked)
        self._count("ranked")
        self._fill_selection(call, booked)
        return ticket, _groups(booked, worker_ids)

    def _fill_selection(self, call: PendingCall, booked: Reservation | None) -> None:
        """Fill in the selection keyword if the call has it."""
        keyword = self._options.selection_keyword
        if keyword in call.kwargs:
            call.kwargs[keyword] = None if booked is None else _selection_of(booked)

    async def _prompt_of(self, call: PendingCall, adapter: str) -> dict[str, Any] | None:
        found = read_prompt(call.args, call.kwargs)
        if not found.is_known and not await self._tokenized(found):
            return None
        if adapter:
            found.fields.setdefault("lora_name", adapter)
        return found.fields

    async def _tokenized(self, found: RequestPrompt) -> bool:
        if self._tokenizer is None or found.payload is None:
            return False
        if inspect.iscoroutinefunction(self._tokenizer):
            tokens = await self._tokenizer(found.payload)
        else:  # some milliseconds for a long prompt
            tokens = await asyncio.to_thread(self._tokenizer, found.payload)
        if not tokens:
            return False
        found.fields["token_ids"] = tokens
        return True

    async def _reserve(
        self, ticket: RoutedRequest, worker_ids: Sequence[int], *, explain: bool = False
    ) -> Reservation:
        options = self._options
        fields: dict[str, Any] = {
            "model_name": options.model_name,
            "tenant_id": options.tenant_id,
            **ticket.fields,
            "allowed_worker_ids": list(worker_ids),
            "timeout_ms": options.timeout_ms,
        }
        if explain:
            fields["explain"] = True
        if ticket.name not in self._names:  # else another call of the request has it
            self._names.add(ticket.name)
            ticket.has_name = True
            try:
                return await ticket.client.reserve(**fields, reservation_id=ticket.name)
            except ReservationConflict:  # that other call is in another process
                pass
            except BaseException:
                self._release_name(ticket)
                raise
        return await ticket.client.reserve(**fields)

    def _pause(self, why: str) -> None:
        """Stop asking for a while, so that others need not wait for a timeout as well."""
        self._paused_until = monotonic() + self._options.pause_s
        self._count(why)

    def _count(self, outcome: str) -> None:
        self.counts[outcome] += 1
        self._on_choice(outcome)

    # -- what becomes of it ------------------------------------------------------------------------

    def routed(self, ticket: RoutedRequest, request: str, worker_id: int) -> None:
        """Note where Serve sends the request; if it is not the best replica, move the booking."""
        if ticket.is_over:
            return
        ticket.is_routed = True
        self._under_way.setdefault((request, worker_id), deque()).append(ticket)
        if worker_id == ticket.worker_id:
            ticket.fields = {}  # prompts are long, and this one is no longer needed
        else:
            self._count("moved")
            ticket.worker_id = worker_id
            task = asyncio.get_running_loop().create_task(self._move(ticket))
            self._moves.add(task)
            task.add_done_callback(self._moves.discard)

    def taken(self, ticket: RoutedRequest) -> None:
        """Note that a replica has the request, so Serve will report its end."""
        self._untaken.pop(ticket, None)

    def note_outcome(self, ticket: RoutedRequest, outcome: Outcome) -> None:
        """Note how a request ended; Serve reports its end without that, right before."""
        if ticket.reservation is not None:
            ticket.reservation.free(outcome)

    def completed(self, request: str, worker_id: int) -> None:
        """End a request at a replica; the oldest of that name, if several calls share it."""
        key = (request, worker_id)
        tickets = self._under_way.get(key)
        if tickets is None:
            return
        self.drop(tickets.popleft())
        if not tickets:
            del self._under_way[key]

    def abandoned(self, ticket: RoutedRequest) -> None:
        """Drop a request that no longer exists, unless it was sent somewhere."""
        if not ticket.is_routed:
            self.drop(ticket, "cancelled")

    def drop(self, ticket: RoutedRequest, outcome: Outcome | None = None) -> None:
        """End a ticket and free its booking. Idempotent."""
        if not ticket.is_over:
            ticket.is_over = True
            self._tickets.pop(ticket, None)
            self._untaken.pop(ticket, None)
            self._release_name(ticket)
            self._client_pool.free(ticket.client, ticket.reservation, outcome)

    async def drop_now(self, ticket: RoutedRequest) -> None:
        """End a ticket whose name is about to be booked again."""
        if not ticket.is_over:
            self.drop(ticket, "cancelled")
            await self._flush(ticket.client)

    def _hold(self, ticket: RoutedRequest, booked: Reservation) -> None:
        ticket.reservation, ticket.worker_id = booked, booked.worker_id
        self._client_pool.hold(ticket.client)
        self._tickets[ticket] = self._untaken[ticket] = None
        if len(self._tickets) > _REMEMBERED:
            self._forget(next(iter(self._tickets)))
        oldest = next(iter(self._untaken))
        if oldest.since < monotonic() - BOOKED_MAX_S:
            self._forget(oldest)

    def _forget(self, ticket: RoutedRequest) -> None:
        self._count("forgotten")
        self.drop(ticket, "cancelled")
        for key, tickets in list(self._under_way.items()):
            if ticket in tickets:
                tickets.remove(ticket)
                if not tickets:
                    del self._under_way[key]

    async def _move(self, ticket: RoutedRequest) -> None:
        """Book the request at its actual replica; if that fails, at least not at another one."""
        self._release_name(ticket)
        if ticket.reservation is not None:
            ticket.reservation.free("cancelled")
            ticket.reservation = None
        try:
            await self._flush(ticket.client)
            booked = await self._reserve(ticket, [ticket.worker_id])
        except Exception:  # noqa: BLE001 - as in `rank`
            self._count("not_moved")
            return
        if ticket.is_over:
            self._release_name(ticket)
            booked.free("cancelled")
        else:
            ticket.reservation, ticket.fields = booked, {}

    def _release_name(self, ticket: RoutedRequest) -> None:
        if ticket.has_name:
            ticket.has_name = False
            self._names.discard(ticket.name)

    async def _flush(self, client: AsyncClient) -> None:
        try:
            async with asyncio.timeout(_FLUSH_S):
                await client.flush()
        except TimeoutError:
            pass

    def check(self) -> None:
        """Assert all invariants."""
        assert all(self._under_way.values())
        assert not any(ticket.is_over for ticket in self._tickets)
        assert self._untaken.keys() <= self._tickets.keys()
        assert {ticket.name for ticket in self._tickets if ticket.has_name} <= self._names


def _selection_of(booked: Reservation) -> dict[str, object]:
    return {
        "reservation_id": booked.reservation_id,
        "worker_id": booked.worker_id,
        "dp_rank": booked.dp_rank,
        "cached_tokens": booked.overlap.longest_matched,
    }


def _groups(booked: Reservation, worker_ids: Sequence[int]) -> list[list[int]]:
    """Return the chosen one, then the others by cost, then those of unknown cost."""
    costs = _costs(booked, worker_ids)
    behind = sorted(costs, key=costs.__getitem__)
    rest = [one for one in worker_ids if one not in costs and one != booked.worker_id]
    groups = [[booked.worker_id], *([one] for one in behind if one != booked.worker_id)]
    return [*groups, rest] if rest else groups


def _costs(booked: Reservation, worker_ids: Sequence[int]) -> Mapping[int, float]:
    decision = booked.selection.decision
    costs: dict[int, float] = {}
    if decision is UNSET or decision.candidates is UNSET:
        return costs
    allowed = set(worker_ids)
    for one in decision.candidates:
        if one.cost is not None and one.excluded is None and one.worker_id in allowed:
            costs[one.worker_id] = min(one.cost, costs.get(one.worker_id, one.cost))
    return costs
