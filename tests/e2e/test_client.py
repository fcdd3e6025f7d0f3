"""The client against a service: a real process, real sockets, both faces."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest

from select_service.client import (
    AsyncClient,
    Client,
    ClientClosed,
    NotCached,
    Options,
    ServiceError,
    hash_prompt,
)
from select_service.client.core.wire import to_jsonable
from select_service.errors import (
    AdmissionRefused,
    InvalidField,
    NoEligibleWorker,
    ReservationConflict,
    WorkerNotFound,
)
from select_service.types import Selection, WorkerPatch, WorkerSpec
from tests.live.server import OURS_EXTRA, Server

pytestmark = pytest.mark.e2e

TOKENS = list(range(64))
QUICK = Options(timeout_ms=5_000, backoff_ms=5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("client")
    args = (*OURS_EXTRA, "--uds", str(folder / "s"))
    with Server(folder / "log", args=args) as running:
        with Client(url(running)) as client:
            for number in (1, 2):
                client.upsert_worker(spec(number))
        yield running


def spec(number: int, **fields: Any) -> WorkerSpec:
    return WorkerSpec(
        worker_id=number,
        endpoint=f"ray://w{number}",
        block_size=16,
        kv_events_endpoint="tcp://127.0.0.1:9",
        **fields,
    )


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def uds(server: Server) -> str:
    return f"unix:{server.args[-1]}"


def total(client: Client) -> tuple[int, int, int]:
    """Requests, prefill tokens and decode blocks under way."""
    rows = [row for scope in client.loads() for row in scope.loads]
    return (
        sum(row.active_requests for row in rows),
        sum(row.potential_prefill_tokens for row in rows),
        sum(row.potential_decode_blocks for row in rows),
    )


def run(use: Callable[[AsyncClient], Awaitable[None]], *selectors: str, **options: Any) -> None:
    async def inside() -> None:
        async with AsyncClient(*selectors, options=Options(**options)) as client:
            await use(client)

    asyncio.run(asyncio.wait_for(inside(), 60))


@pytest.mark.parametrize("msgpack", [True, False])
def test_a_life_over_a_unix_socket(server: Server, msgpack: bool) -> None:
    async def use(client: AsyncClient) -> None:
        async with client.reserve(token_ids=TOKENS, allowed_worker_ids=[1]) as r:
            assert (r.endpoint, r.dp_rank, r.worker_id, r.degraded) == ("ray://w1", 0, 1, False)
            assert (r.overlap.gpu, r.effective_prefill_tokens) == (0, 64)
            r.prefill_complete(cached_tokens=0)
            for _ in range(20):
                r.output_tokens(2)
            await client.flush()
            (scope,) = await client.loads()
            row = next(one for one in scope.loads if one.worker_id == 1)
            assert (row.active_requests, row.potential_prefill_tokens) == (1, 0)
            assert row.potential_decode_blocks == 4 + 2
        await client.flush()
        (scope,) = await client.loads()
        assert not sum(row.active_requests for row in scope.loads)

    run(use, uds(server), msgpack=msgpack)


def test_in_threads(server: Server) -> None:
    def live(client: Client, number: int) -> None:
        for turn in range(5):
            with client.reserve(token_ids=[number, turn, *TOKENS]) as r:
                r.prefill_complete()
                r.output_tokens(33)

    with Client(url(server), options=QUICK) as client:
        threads = [threading.Thread(target=live, args=(client, n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.flush()
        assert total(client) == (0, 0, 0)
        assert client.stats()["retries"] == 0
    with pytest.raises(ClientClosed):
        client.reserve(token_ids=TOKENS)


def test_what_is_raised_inside_frees(server: Server) -> None:
    with Client(url(server)) as client:
        with pytest.raises(KeyError), client.reserve(token_ids=TOKENS):
            raise KeyError
        client.flush()
        assert total(client)[0] == 0
        assert client.call("GET", "/leases", kind=dict[str, Any])["leases"][0]["reservations"] == 0
    with Client(url(server)) as other:
        assert other.call("GET", "/leases", kind=dict[str, Any]) == {"leases": [], "total": 0}


def test_leaving_frees_what_nobody_has(server: Server) -> None:
    with Client(url(server)) as other:
        with Client(url(server)) as client:
            client.reserve(token_ids=TOKENS)
            assert total(other)[0] == 1
        assert total(other)[0] == 0


def test_cancelled_at_any_moment(server: Server) -> None:
    async def use(client: AsyncClient) -> None:
        dice = random.Random(7)

        async def one() -> None:
            async with client.reserve(token_ids=TOKENS) as r:
                r.prefill_complete()
                await asyncio.Event().wait()

        tasks = [asyncio.ensure_future(one()) for _ in range(30)]
        for task in tasks:
            await asyncio.sleep(dice.random() * 0.004)
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(one) for one in ended} == {asyncio.CancelledError}
        await client.flush()
        (scope,) = await client.loads()
        assert not sum(row.active_requests for row in scope.loads)

    run(use, url(server))


def test_a_cancellation_that_a_transport_swallows(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As anyio does when a connection is made in the same moment."""
    ask = httpx.AsyncHTTPTransport.handle_async_request

    async def use(client: AsyncClient) -> None:
        booked = asyncio.Event()

        async def swallow(self: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
            response = await ask(self, request)
            if request.url.path == "/select_and_reserve":
                booked.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            return response

        async def one() -> None:
            async with client.reserve(token_ids=TOKENS):
                pytest.fail("it was cancelled before")

        monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", swallow)
        task = asyncio.ensure_future(one())
        await booked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.flush()
        (scope,) = await client.loads()
        assert not sum(row.active_requests for row in scope.loads)

    run(use, url(server))


def test_refusals(server: Server) -> None:
    with Client(url(server), options=QUICK) as client:
        with pytest.raises(NoEligibleWorker):
            client.select(token_ids=TOKENS, allowed_worker_ids=[])
        with pytest.raises(WorkerNotFound) as missing:
            client.patch_worker(99, WorkerPatch(endpoint="x"))
        assert (missing.value.status, str(missing.value)) == (404, "worker 99 not found")
        with pytest.raises(InvalidField) as wrong:
            client.select(token_ids=TOKENS, isl_tokens=-1)
        assert wrong.value.field == "isl_tokens"
        with pytest.raises(NotCached) as cold:
            client.reserve(token_ids=[*range(1000, 1064)], cache_hit_threshold=0.5)
        assert cold.value.answer.best_worker.worker_id in {1, 2}
        with client.reserve(token_ids=TOKENS, reservation_id="mine"):
            with pytest.raises(ReservationConflict):
                client.reserve(token_ids=[1], reservation_id="mine")
            assert total(client)[0] == 1, "another's booking is not freed for that"
        client.flush()
        with pytest.raises(ServiceError, match="route not found"):
            client.call("GET", "/nowhere")


def test_a_gate_says_why(server: Server) -> None:
    with Client(url(server), options=Options(timeout_ms=300)) as client:
        policy: dict[str, object] = {"policy": "reject-all"}
        client.call("PUT", "/admission", policy)
        try:
            with pytest.raises(AdmissionRefused) as refused:
                client.select(token_ids=TOKENS, slo_class="batch")
        finally:
            client.call("PUT", "/admission", {"policy": "always-admit"})
        assert refused.value.gate == "policy"
        assert refused.value.policy == "reject-all"
        assert refused.value.retry_after_s > 0


@pytest.mark.parametrize(
    "names", [{}, {"lora_name": "a"}, {"cache_salt": "s"}, {"lora_name": "a", "cache_salt": "s"}]
)
def test_hashed_here_as_there(server: Server, names: dict[str, str]) -> None:
    tokens = [7 * number % 50_000 for number in range(100)]
    with (
        Client(url(server)) as plain,
        Client(url(server), options=Options(hash_locally=True)) as hashing,
        plain.reserve(token_ids=tokens, **names) as r,  # type: ignore[arg-type]
        hashing.reserve(token_ids=tokens, **names) as other,  # type: ignore[arg-type]
    ):
        assert r.selection.sequence_hashes == other.selection.sequence_hashes
        assert r.selection.isl_tokens == other.selection.isl_tokens == 100
        body = to_jsonable(hash_prompt(tokens, 16, **names))  # type: ignore[arg-type]
        assert body["sequence_hashes"] == r.selection.sequence_hashes


def test_looking_inside(server: Server) -> None:
    with Client(url(server)) as client:
        assert client.ready().schedulable_workers == 2
        assert [one.worker_id for one in client.workers()] == [1, 2]
        chosen = client.select(block_hashes=[1, 2**63], isl_tokens=40, selection_id="why-me")
        assert isinstance(chosen, Selection)
        assert client.decision("why-me").chosen is not None
        assert client.decisions(limit=1)[0].decision_id == "why-me"
        assert len(client.potential_loads(token_ids=TOKENS)) == 2
        assert client.overlap_scores(token_ids=TOKENS).num_blocks == 4


def test_output_blocks_by_their_total(server: Server) -> None:
    with Client(url(server)) as client, client.reserve(token_ids=TOKENS) as r:
        name = r.reservation_id
        for count, blocks in ((0, 4), (2, 6), (2, 6), (1, 6), (3, 7)):
            operation = {"op": "output_block", "reservation_id": name, "total": count}
            body: dict[str, object] = {"operations": [operation]}
            assert client.call("POST", "/reservations/batch", body) == {
                "results": [{"status": 200}]
            }
            assert total(client)[2] == blocks
