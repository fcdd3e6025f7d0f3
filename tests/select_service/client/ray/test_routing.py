"""What a request router asks, books and frees, against a client that only pretends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from select_service.client.asynchronous import AsyncClient
from select_service.client.core.options import Options
from select_service.client.core.problems import BlockSizeUnknown, TimedOut, Unreachable
from select_service.client.ray import routing as rooms
from select_service.client.ray.client_pool import ClientPool
from select_service.client.ray.routing import RoutedRequest, Routing, RoutingOptions
from select_service.errors import NoSchedulableWorker, ReservationConflict
from select_service.types import Overlap, Selection
from tests.coroutines import within

TOKENS = [1, 2, 3]


class Booked:
    """A reservation nobody has booked."""

    def __init__(self, name: str, worker_id: int, *, degraded: bool = False) -> None:
        self.reservation_id = name
        self.worker_id = worker_id
        self.dp_rank = 0
        self.degraded = degraded
        self.is_freed = False
        self.outcome: str | None = None
        self.overlap = Overlap(longest_matched=0, gpu=0, dp={}, cpu=0, disk=0)
        self.selection = Selection(
            model_name="default",
            tenant_id="default",
            worker_id=worker_id,
            dp_rank=0,
            endpoint="http://w",
            block_size=16,
            overlap=self.overlap,
            effective_prefill_tokens=0,
        )

    def free(self, outcome: str | None = None) -> None:
        self.is_freed = True
        self.outcome = outcome


class Pretender:
    """A client that chooses the first worker it may, or fails as it is set to."""

    degraded = False

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.booked: list[Booked] = []
        self.failures: list[BaseException] = []
        self.flushed = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def reserve(self, **fields: Any) -> Booked:
        self.asked.append(fields)
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        name = fields.get("reservation_id") or f"minted-{len(self.asked)}"
        self.booked.append(Booked(name, fields["allowed_worker_ids"][0]))
        return self.booked[-1]

    async def flush(self) -> None:
        self.flushed += 1

    @property
    def live(self) -> list[tuple[str, int]]:
        return [(b.reservation_id, b.worker_id) for b in self.booked if not b.is_freed]


class Call:
    def __init__(self, **kwargs: Any) -> None:
        self.args: list[Any] = []
        self.kwargs: dict[Any, Any] = kwargs or {"token_ids": TOKENS}
        self.future: asyncio.Future[Any] = asyncio.Future()


@contextlib.asynccontextmanager
async def playing(
    tokenizer: Any = None, **options: Any
) -> AsyncIterator[tuple[Routing, Pretender]]:
    """At its end nothing may be booked or remembered any more."""
    client_pool, client = ClientPool((), Options()), Pretender()
    client_pool.client = cast(AsyncClient, client)
    routing = Routing(client_pool, RoutingOptions(**options), tokenizer)
    yield routing, client
    await asyncio.gather(*routing._moves)
    routing.check()
    assert not client.live
    assert not routing._names
    assert not routing._tickets


async def ranked(
    routing: Routing, name: str = "n", **kwargs: Any
) -> tuple[RoutedRequest, list[list[int]]]:
    found = await routing.rank(Call(**kwargs), name, [5, 6, 7])
    assert found is not None
    return found


@within(playing, model_name="m", tenant_id="t", timeout_ms=50.0)
async def test_what_is_asked(routing: Routing, client: Pretender) -> None:
    ticket, groups = await ranked(routing, token_ids=TOKENS, cache_salt="s")
    assert groups == [[5], [6, 7]], "whose cost is not known stands behind"
    (asked,) = client.asked
    assert asked == {
        "model_name": "m",
        "tenant_id": "t",
        "token_ids": TOKENS,
        "cache_salt": "s",
        "allowed_worker_ids": [5, 6, 7],
        "timeout_ms": 50.0,
        "explain": True,
        "reservation_id": "n",
    }
    routing.routed(ticket, "r", 5)
    assert client.live == [("n", 5)]
    routing.completed("r", 6)
    routing.completed("q", 5)
    assert client.live
    routing.completed("r", 5)
    routing.completed("r", 5)


@within(playing, ranked_max=2)
async def test_many_replicas_are_not_ranked_one_by_one(routing: Routing, client: Pretender) -> None:
    ticket, groups = await ranked(routing)
    assert groups == [[5], [6, 7]]
    assert "explain" not in client.asked[0]
    routing.drop(ticket)
    routing.drop(ticket)


@within(playing, selection_keyword="selection")
async def test_the_keyword_is_filled_where_there_is_room(
    routing: Routing, client: Pretender
) -> None:
    call = Call(token_ids=TOKENS, selection=None)
    found = await routing.rank(call, "n", [5])
    assert found is not None
    filled = {"reservation_id": "n", "worker_id": 5, "dp_rank": 0, "cached_tokens": 0}
    assert call.kwargs["selection"] == filled
    routing.drop(found[0])
    client.failures.append(Unreachable())
    assert await routing.rank(call, "n", [5]) is None
    assert call.kwargs["selection"] is None, "nothing is left of the last time"
    other = Call(token_ids=TOKENS)
    assert await routing.rank(other, "n", [5]) is None
    assert "selection" not in other.kwargs


async def test_a_move_that_is_overtaken_by_the_end() -> None:
    async with playing() as (routing, client):
        ticket, _ = await ranked(routing)
        client.gate.clear()
        routing.routed(ticket, "r", 7)
        await asyncio.sleep(0)
        routing.completed("r", 7)
        client.gate.set()
    assert routing.counts["moved"] == 1


async def test_a_move_nobody_takes_down() -> None:
    async with playing() as (routing, client):
        ticket, _ = await ranked(routing)
        client.failures.append(TimedOut())
        routing.routed(ticket, "r", 7)
        await asyncio.gather(*routing._moves)
        assert not client.live, "not booked there, and not here any more"
        routing.completed("r", 7)
    assert routing.counts["not_moved"] == 1


@within(playing)
async def test_after_a_move_it_has_its_name(routing: Routing, client: Pretender) -> None:
    ticket, _ = await ranked(routing)
    routing.routed(ticket, "r", 6)
    await asyncio.gather(*routing._moves)
    assert client.live == [("n", 6)]
    routing.completed("r", 6)


@within(playing)
async def test_calls_that_share_a_name(routing: Routing, client: Pretender) -> None:
    tickets = [(await ranked(routing))[0] for _ in range(3)]
    assert [name for name, _ in client.live] == ["n", "minted-2", "minted-3"]
    client.failures.append(ReservationConflict("another process has it"))
    other, _ = await ranked(routing, "m")
    assert client.live[-1][0] == "minted-5"
    for ticket in (*tickets, other):
        routing.routed(ticket, "r", 5)
        routing.completed("r", 5)


@pytest.mark.parametrize(
    ("failure", "count", "pauses"),
    [
        (TimedOut(), "timeout", True),
        (Unreachable(), "unreachable", True),
        (NoSchedulableWorker("nobody"), "unknown_replicas", False),
        (BlockSizeUnknown(), "no_selector", False),
        (RuntimeError("a bug"), "error", False),
    ],
)
@within(playing, pause_s=60.0)
async def test_whatever_fails_leaves_it_to_serve(
    routing: Routing, client: Pretender, *, failure: BaseException, count: str, pauses: bool
) -> None:
    client.failures.append(failure)
    assert await routing.rank(Call(), "n", [5]) is None
    assert routing.counts[count] == 1
    again = await routing.rank(Call(), "n", [5])
    assert (again is None) == pauses, "who did not answer is left alone for a moment"
    if again is not None:
        routing.drop(again[0])


async def test_a_degraded_choice_is_none() -> None:
    async with playing() as (routing, client):

        async def reserve(**_: Any) -> Booked:
            client.booked.append(Booked("n", 5, degraded=True))
            return client.booked[-1]

        client.reserve = reserve  # type: ignore[method-assign]
        assert await routing.rank(Call(), "n", [5]) is None
        client.degraded = True
        assert await routing.rank(Call(), "n", [5]) is None
        assert len(client.booked) == 1
        routing._names.clear()
    assert routing.counts == {"unreachable": 2}


@within(playing)
async def test_a_cancelled_question_leaves_nothing(routing: Routing, client: Pretender) -> None:
    client.gate.clear()
    asking = asyncio.ensure_future(routing.rank(Call(), "n", [5]))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


def plain(payload: Any) -> list[int]:
    return list(payload["messages"][0]["content"].encode())


async def slow(payload: Any) -> list[int]:
    return plain(payload)


@pytest.mark.parametrize("tokenizer", [plain, slow])
async def test_text_is_tokenized(tokenizer: Any) -> None:
    async with playing(tokenizer) as (routing, client):
        body = {"messages": [{"role": "user", "content": "hi"}]}
        ticket, _ = await ranked(routing, body=body)
        assert client.asked[0]["token_ids"] == [104, 105]
        routing.drop(ticket)


@pytest.mark.parametrize("tokenizer", [lambda _: None, None])
async def test_who_finds_no_tokens_does_not_ask(tokenizer: Any) -> None:
    async with playing(tokenizer) as (routing, client):
        assert await routing.rank(Call(prompt="text"), "n", [5]) is None
        assert not client.asked
    assert routing.counts == {"no_prompt": 1}


async def test_what_serve_forgets_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "_REMEMBERED", 2)
    async with playing() as (routing, client):
        tickets = [(await ranked(routing, f"n{n}"))[0] for n in range(2)]
        for ticket in tickets:
            routing.routed(ticket, "r", 5)
        last, _ = await ranked(routing, "n2")
        assert client.live == [("n1", 5), ("n2", 5)]
        routing.drop(last)
        routing.completed("r", 5)
    assert routing.counts["forgotten"] == 1


async def test_an_hour_is_nothing_for_a_request_that_a_replica_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(rooms, "monotonic", lambda: clock[0])
    async with playing() as (routing, client):
        agent, _ = await ranked(routing, "agent")
        routing.routed(agent, "long", 5)
        routing.taken(agent)
        lost, _ = await ranked(routing, "lost")  # a choice that nobody will dispatch
        routing.routed(lost, "none", 5)
        clock[0] += 2 * 3600.0
        last, _ = await ranked(routing, "last")
        assert client.live == [("agent", 5), ("last", 5)]
        routing.drop(last)
        routing.completed("long", 5)
    assert routing.counts["forgotten"] == 1
