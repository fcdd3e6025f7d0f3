"""The client against a service: a real process, real sockets, both faces."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpcore
import pytest

from select_service.client import (
    AnswerTooLarge,
    AsyncClient,
    BlockSizeUnknown,
    Client,
    ClientClosed,
    ForkedClient,
    NotCached,
    Options,
    ServiceError,
    hash_prompt,
)
from select_service.client.core.codec import to_jsonable
from select_service.errors import (
    AdmissionRefused,
    InvalidField,
    LeaseNotFound,
    LeaseReopened,
    NoEligibleWorker,
    NoSchedulableWorker,
    ReservationConflict,
    WorkerNotFound,
)
from select_service.types import (
    BatchFree,
    BatchOutputBlock,
    BatchPrefillComplete,
    Selection,
    WorkerPatch,
    WorkerSpec,
)
from select_service.types.admission import RankMetrics, WorkerMetrics
from select_service.types.batches import SelectBatchItem, SelectBatchRequest
from tests import wait
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

    wait.run(inside())


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


def in_a_fork(do: Callable[[], object]) -> str:
    """What became of it there."""
    here, there = multiprocessing.Pipe()

    def send() -> None:
        try:
            there.send(str(do()))
        except ForkedClient as error:
            there.send(type(error).__name__)

    child = multiprocessing.get_context("fork").Process(target=send)
    child.start()
    try:
        assert here.poll(20), "it hangs"
        return str(here.recv())
    finally:
        child.kill()
        child.join()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_a_client_of_its_own(server: Server) -> None:
    """Both would read answers from the same sockets, and nobody would send what the fork frees."""
    with Client(url(server)) as client:
        unused = Client(url(server))
        client.reserve(token_ids=TOKENS)
        assert in_a_fork(lambda: client.select(token_ids=TOKENS)) == ForkedClient.__name__
        assert in_a_fork(lambda: client.reserve(token_ids=TOKENS)) == ForkedClient.__name__
        assert in_a_fork(client.flush) == ForkedClient.__name__
        assert in_a_fork(client.close) == "None"
        leases = client.call("GET", "/leases")  # of any type, unless one is named
        assert leases["leases"][0]["reservations"] == 1
        assert total(client)[0] == 1, "it is ours, and so is its lease"
        assert in_a_fork(lambda: total(unused)[0]) == "1"
        assert total(unused)[0] == 1
        unused.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_reservation_is_of_the_process_it_was_booked_in(server: Server) -> None:
    """A thread that is not in the fork may hold its lock, and nobody there would send anything."""
    with Client(url(server)) as client:
        reservation = client.reserve(token_ids=TOKENS)
        with client._lock, ThreadPoolExecutor(1) as elsewhere:  # in the fork, we are that thread
            calls = (reservation.prefill_complete, reservation.output_tokens, reservation.free)
            refused = [elsewhere.submit(in_a_fork, one).result() for one in calls]
        assert refused == [ForkedClient.__name__, ForkedClient.__name__, "None"]
        assert total(client)[0] == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_who_has_entered_is_at_work(server: Server) -> None:
    """What reports and renews runs on the loop it was entered on, which a fork does not have."""

    async def use() -> None:
        async with AsyncClient(url(server)) as client:
            assert in_a_fork(lambda: asyncio.run(flush(client))) == ForkedClient.__name__
            assert in_a_fork(lambda: asyncio.run(client.aclose())) == "None"

    async def flush(client: AsyncClient) -> None:
        async with client.reserve(token_ids=TOKENS):
            pass
        await client.flush()

    asyncio.run(use())


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
    ask = httpcore.AsyncHTTPConnection.handle_async_request

    async def use(client: AsyncClient) -> None:
        booked = asyncio.Event()

        async def swallow(
            self: httpcore.AsyncHTTPConnection, request: httpcore.Request
        ) -> httpcore.Response:
            response = await ask(self, request)
            if request.url.target == b"/select_and_reserve":
                booked.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            return response

        async def one() -> None:
            async with client.reserve(token_ids=TOKENS):
                pytest.fail("it was cancelled before")

        monkeypatch.setattr(httpcore.AsyncHTTPConnection, "handle_async_request", swallow)
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
    with Client(url(server)) as client:
        policy: dict[str, object] = {"policy": "reject-all"}
        client.call("PUT", "/admission", policy)
        try:
            with pytest.raises(AdmissionRefused) as refused:
                client.select(token_ids=TOKENS, slo_class="batch", timeout_ms=1_000)
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


def test_a_rank_that_was_chosen_elsewhere_is_booked(server: Server) -> None:
    with Client(url(server)) as client:
        chosen = client.select(token_ids=TOKENS)
        assert isinstance(chosen, Selection)
        with client.book(
            chosen.worker_id,
            chosen.dp_rank,
            token_ids=TOKENS,
            effective_prefill_tokens=chosen.effective_prefill_tokens,
        ) as r:
            assert (r.endpoint, r.effective_prefill_tokens) == (chosen.endpoint, 64)
            assert total(client) == (1, 64, 4)
            r.prefill_complete()
            r.output_tokens(16)
            client.flush()
            assert total(client) == (1, 0, 5)
        client.flush()
        assert total(client) == (0, 0, 0)
        with pytest.raises(WorkerNotFound), client.book(99, token_ids=TOKENS):
            pytest.fail("nobody has that worker")
        with pytest.raises(BlockSizeUnknown):
            client.book(1, token_ids=TOKENS, model_name="unknown")

    async def use(client: AsyncClient) -> None:
        hashes = [5, 6, 7]
        async with client.book(2, sequence_hashes=hashes, isl_tokens=50, block_size=16) as r:
            assert (r.worker_id, r.effective_prefill_tokens) == (2, 50)

    run(use, url(server))


def test_a_pair(server: Server) -> None:
    scope: dict[str, Any] = {"tenant_id": "pairs"}
    with Client(url(server)) as client:
        with pytest.raises(NoSchedulableWorker):
            client.reserve_pair(token_ids=TOKENS, timeout_ms=1_000, **scope)
        client.upsert_worker(spec(31, role="prefill", **scope))
        client.upsert_worker(spec(32, role="decode", **scope))
        result = client.report(32, WorkerMetrics(ranks=[RankMetrics(kv_used_blocks=1)]))
        assert (result.accepted, result.dropped) == ([0], [])
        assert client.drain_status(32).reservations == 0
        with client.reserve_pair(token_ids=TOKENS, **scope) as pair:
            assert pair.prefill is not None
            assert (pair.prefill.worker_id, pair.decode.worker_id) == (31, 32)
            assert (pair.decode.endpoint, pair.pair.mode) == ("ray://w32", "disaggregated")
            assert repr(pair).endswith("worker 31 rank 0, worker 32 rank 0>")
            assert total(client) == (2, 64, 4)
            pair.prefill_complete()
            pair.output_tokens(32)
            client.flush()
            assert total(client) == (1, 0, 6)
        client.flush()
        assert total(client) == (0, 0, 0)
        for number in (31, 32):
            client.delete_worker(number)


def test_many_calls_and_a_lease_of_ones_own(server: Server) -> None:
    with Client(url(server)) as client:
        lease = client.open_lease(ttl_s=20.0, owner="me")
        assert [one.lease_id for one in client.leases(owner="me").leases] == [lease.lease_id]
        body: dict[str, object] = {"reservation_id": "mine", "lease_id": lease.lease_id}
        client.call("POST", "/select_and_reserve", body | {"token_ids": TOKENS})
        results = client.batch(
            [
                BatchPrefillComplete(reservation_id="mine"),
                BatchOutputBlock(reservation_id="mine", total=2),
                BatchFree(reservation_id="nobody's"),
            ]
        )
        assert [one.status for one in results] == [200, 200, 404]
        assert total(client) == (1, 0, 6)
        assert client.renew_lease(lease.lease_id, ttl_s=10.0).reservations == 1
        client.close_lease(lease.lease_id)
        assert total(client) == (0, 0, 0)
        with pytest.raises(LeaseReopened):
            client.open_lease(lease.lease_id)
        with pytest.raises(LeaseNotFound):
            client.renew_lease("nobody's")


def test_a_batch_and_a_lost_reply_to_it(server: Server) -> None:
    with Client(url(server)) as client:
        hashes = b"".join(number.to_bytes(8, "little") for number in range(1, 5))
        items = [
            SelectBatchItem(
                block_hashes=hashes, sequence_hashes=hashes, isl_tokens=64, n=3, ttl_s=60.0
            )
        ]
        batch = SelectBatchRequest(requests=items, reserve=True)
        answer = client.select_batch(batch)
        assert (answer.placed, answer.groups, answer.prefixes_computed) == (3, 1, 1)
        again = client.select_batch(batch)
        assert [one.selection for one in again.results] == [one.selection for one in answer.results]
        assert total(client)[0] == 3
        names = [one.selection.reservation_id for one in answer.results if one.selection]
        freed = [BatchFree(reservation_id=str(name)) for name in names]
        assert [one.status for one in client.batch(freed)] == [200] * 3
        assert total(client) == (0, 0, 0)


def test_an_answer_may_be_too_large(server: Server) -> None:
    """A list that is given its length, and one that comes in parts."""
    small = Options(answer_bytes_max=40, attempts_max=1, catalog_refresh_s=1e6)

    async def use(client: AsyncClient) -> None:
        for path in ("/workers", "/dump", "/openapi.json"):
            with pytest.raises(AnswerTooLarge, match="more than 40 bytes"):
                await client.call("GET", path)
        assert (await client.call("GET", "/health", kind=dict[str, str]))["status"] == "ok"
        with pytest.raises(AnswerTooLarge):
            await client.reserve(token_ids=TOKENS)
        await client.flush()

    async def inside() -> None:
        async with AsyncClient(url(server), options=small) as client:
            await use(client)

    asyncio.run(inside())
    with Client(url(server), options=small) as client:
        with pytest.raises(AnswerTooLarge):
            client.workers()
        with pytest.raises(AnswerTooLarge):
            client.reserve(token_ids=TOKENS)
    with Client(url(server)) as client:
        assert total(client) == (0, 0, 0), "what nobody could read is freed"


def test_a_path_is_written_out(server: Server) -> None:
    with Client(url(server) + "/") as client:
        assert client.call("GET", "/workers?model_name=a b ü") == []


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
