"""The class in the place of Dynamo's: calls, errors, and the loops and threads it is called from.

How it compares with the binding itself is in `tests/e2e/test_peer_binding.py`.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from select_service.compat.dynamo import (
    SelectionCacheConfig,
    SelectionService,
    SelectionServiceError,
)
from select_service.errors import ReservationNotFound
from tests.live.ports import free_base
from tests.wait import block_until, run, until

WORKER = {
    "worker_id": 1,
    "tenant_id": "default",
    "endpoint": "ray://1",
    "block_size": 16,
    "kv_events_endpoints": {0: "tcp://127.0.0.1:9"},
}
TOKENS = list(range(64))


def loads(service: SelectionService) -> list[int]:
    """Prefill tokens, decode blocks and requests of the first rank."""
    row = service.loads()[0]["loads"][0]
    names = ("potential_prefill_tokens", "potential_decode_blocks", "active_requests")
    return [row[name] for name in names]


def peers_known(service: SelectionService) -> int:
    """How many other services one has received messages of."""
    return len(service._driver.core.replicas.publishers.views)


async def test_a_request_as_ray_makes_it() -> None:
    service = SelectionService(indexer_threads=4)
    assert (await service.upsert_worker(WORKER))["kv_events_endpoints"] == {0: "tcp://127.0.0.1:9"}
    chosen = await service.select_and_reserve(
        {
            "model_name": "default",
            "tenant_id": "default",
            "selection_id": "r",
            "token_ids": TOKENS,
            "allowed_worker_ids": [1],
            "expected_output_tokens": None,
        }
    )
    assert chosen["selection_id"] == "r"
    assert "reservation_id" not in chosen
    assert (chosen["worker_id"], chosen["dp_rank"]) == (1, 0)
    assert chosen["overlap"]["longest_matched"] == 0
    assert loads(service) == [64, 4, 1]
    await service.prefill_complete("r")
    service.add_output_block("r", decay_fraction=1.0)
    assert loads(service) == [0, 5, 1]
    peer = SelectionService()
    await peer.upsert_worker(WORKER)
    copied = ("worker_id", "dp_rank", "sequence_hashes", "isl_tokens")
    facts = {name: chosen[name] for name in (*copied, "effective_prefill_tokens")}
    await peer.create_reservation({"selection_id": "r", **facts})
    assert loads(peer) == [64, 4, 1]
    await peer.free_reservation("r")
    await service.free_reservation("r")
    assert loads(peer) == loads(service) == [0, 0, 0]
    for one in (peer, service):
        await one.shutdown_async()


async def test_a_call_has_begun_when_it_returns() -> None:
    service = SelectionService()
    service.upsert_worker(WORKER)
    service.create_reservation({"selection_id": "r", "worker_id": 1, "token_ids": TOKENS})
    chosen = await service.select({"token_ids": TOKENS})
    assert chosen["potential_decode_blocks"] == 4  # shared with the reservation
    assert loads(service) == [64, 4, 1]
    service.shutdown()
    with pytest.raises(SelectionServiceError, match="shutting down") as refused:
        await service.select({"token_ids": TOKENS})
    assert (refused.value.kind, refused.value.status_code) == ("not_ready", 503)
    await service.shutdown_async()


def test_built_without_a_loop_it_serves_every_loop_and_thread() -> None:
    service = SelectionService()
    assert service.ready()["ready"] is False

    async def register() -> None:
        await service.upsert_worker(WORKER)

    async def reserve(name: str) -> Any:
        asked = {"selection_id": name, "token_ids": TOKENS}
        return await service.select_and_reserve(asked)

    run(register())
    with ThreadPoolExecutor(4) as pool:
        names = [f"r{number}" for number in range(8)]
        for chosen in pool.map(lambda name: asyncio.run(reserve(name)), names):
            assert chosen["worker_id"] == 1
        list(pool.map(service.add_output_block, names))
        with pytest.raises(SelectionServiceError, match="not found"):
            pool.submit(service.add_output_block, "nobody").result()
    assert loads(service)[2] == 8
    service.shutdown()


async def test_built_on_a_loop_it_is_called_from_other_threads() -> None:
    service = SelectionService()

    async def elsewhere() -> Any:
        await service.upsert_worker(WORKER)
        return service.ready()

    ready = await asyncio.to_thread(asyncio.run, elsewhere())
    assert ready["ready"] is True
    await service.shutdown_async()


def test_dropped_it_ends_its_thread() -> None:
    before = threading.enumerate()  # those of other tests may still be ending
    service: SelectionService | None = SelectionService()
    (thread,) = (one for one in threading.enumerate() if one not in before)
    assert thread.name == "select-service"
    del service
    gc.collect()
    block_until(lambda: not thread.is_alive())


async def test_cancelling_a_call_that_waits_withdraws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ROUTER_QUEUE_THRESHOLD", "0.5")
    service = SelectionService()
    await service.upsert_worker(WORKER | {"max_num_batched_tokens": 64})
    await service.select_and_reserve({"selection_id": "a", "token_ids": TOKENS})
    waiting = service.select_and_reserve({"selection_id": "b", "token_ids": TOKENS})
    await until(lambda: service.loads()[0]["pending_count"] == 1)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert service.loads()[0]["pending_count"] == 0
    await service.free_reservation("a")
    assert loads(service) == [0, 0, 0]
    await service.shutdown_async()


async def test_no_queue_unless_a_variable_asks_for_one() -> None:
    service = SelectionService()
    await service.upsert_worker(WORKER | {"max_num_batched_tokens": 1})
    for number in range(3):
        await service.select_and_reserve({"selection_id": str(number), "token_ids": TOKENS})
    assert loads(service)[2] == 3
    await service.shutdown_async()


async def test_a_selection_is_reserved_once() -> None:
    service = SelectionService(selection_cache=SelectionCacheConfig(max_entries=2))
    await service.upsert_worker(WORKER)
    for name in ("old", "s", "t"):
        await service.select({"token_ids": TOKENS, "selection_id": name})
    assert (await service.create_reservation({"selection_id": "s"}))["worker_id"] == 1
    for name in ("s", "old"):
        with pytest.raises(SelectionServiceError, match="no pending selection"):
            await service.create_reservation({"selection_id": name})
    assert loads(service) == [64, 4, 1]
    await service.shutdown_async()


async def test_sessions_by_both_names() -> None:
    service = SelectionService(session_affinity_ttl_secs=60)
    for number in (1, 2):
        await service.upsert_worker(WORKER | {"worker_id": number})
    first = {"selection_id": "a", "session_id": "z", "allowed_worker_ids": [2]}
    await service.select_and_reserve({"token_ids": TOKENS, **first})
    await service.free_reservation("a")
    context = {"session_context": {"session_id": "z"}}
    for name in "bcdefgh":
        asked = {"token_ids": TOKENS, "selection_id": name, **context}
        assert (await service.select_and_reserve(asked))["worker_id"] == 2
        await service.free_reservation(name)
    await service.shutdown_async()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"indexer_threads": -1}, OverflowError),
        ({"replica_sync_peers": ["tcp://127.0.0.1:9"]}, ValueError),
        ({"replica_sync_port": 0}, ValueError),
        ({"session_affinity_ttl_secs": 0}, ValueError),
        ({"selection_cache": {}}, TypeError),
        ({"unknown": 1}, TypeError),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        SelectionService(**arguments)


def test_a_policy_file_that_cannot_be_used(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "policy.yaml"
    monkeypatch.setenv("DYN_ROUTER_POLICY_CONFIG", str(file))
    with pytest.raises(ValueError, match="No such file"):
        SelectionService()
    file.write_text(
        "default_policy_family: default\n"
        "uncached_isl_buckets: [{min_tokens: 0, bucket: all}]\n"
        "policy_classes:\n"
        "  - {name: default, policy_family: default, cache_bucket: all, queue_policy: edf}\n"
    )
    with pytest.raises(ValueError, match="queue_policy"):
        SelectionService()


async def test_unknown_members_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    service = SelectionService()
    await service.upsert_worker(WORKER)
    for _ in range(2):
        await service.select({"token_ids": TOKENS, "surprise": 1})
    await service.shutdown_async()
    assert [one.getMessage() for one in caplog.records if "surprise" in one.getMessage()] == [
        "unknown member of a SelectRequest ignored: 'surprise'"
    ]


def test_errors_travel_between_processes() -> None:
    async def play() -> SelectionServiceError:
        service = SelectionService()
        with pytest.raises(SelectionServiceError) as refused:
            await service.free_reservation("nobody")
        assert isinstance(refused.value.__cause__, ReservationNotFound)
        await service.shutdown_async()
        return refused.value

    error = run(play())
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.kind, copy.status_code, copy.code) == (
        "reservation nobody not found", "not_found", 404, "reservation_not_found",
    )  # fmt: skip


PROVIDED = """
import sys
from select_service.compat.dynamo import install
assert not {"numpy", "zmq", "select_service.edge"} & sys.modules.keys(), "loaded too early"
install(); install()
import dynamo.llm, dynamo._core
from select_service.compat.selection_service import SelectionService
assert dynamo.llm.SelectionService is dynamo._core.SelectionService is SelectionService
assert issubclass(dynamo._core.SelectionServiceError, dynamo._core.DynamoException)
try:
    import dynamo.nothing
except ImportError:
    print("provided")
"""


def test_provided_as_dynamo() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROVIDED], capture_output=True, text=True, check=False
    )
    assert ended.stdout == "provided\n", ended.stderr


def test_what_is_installed_comes_first(tmp_path: Any) -> None:
    (tmp_path / "dynamo" / "llm").mkdir(parents=True)
    (tmp_path / "dynamo" / "llm" / "__init__.py").write_text("SelectionService = 'theirs'\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from select_service.compat.dynamo import install\n"
        "install()\n"
        "from dynamo.llm import SelectionService\n"
        "print(SelectionService)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.stdout == "theirs\n", ended.stderr


def test_provided_by_a_line_in_site_packages(tmp_path: Any) -> None:
    (tmp_path / "dynamo.pth").write_text(
        "import select_service.compat.dynamo as dynamo; dynamo.install()\n"
    )
    code = (
        f"import site; site.addsitedir({str(tmp_path)!r})\n"
        "from dynamo.llm import SelectionService\n"
        "print(SelectionService.__module__)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.stdout == "select_service.compat.selection_service\n", ended.stderr


@pytest.mark.parametrize(("weight", "chosen"), [("0", 1), ("1.4", 1), ("1.6", 2)])
async def test_each_request_of_a_rank_costs(
    weight: str, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests of a block each against one of six blocks: 1.6.1 chooses the same."""
    monkeypatch.setenv("DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT", weight)
    names: list[str] = []
    service = SelectionService()
    for worker_id in (1, 2):
        await service.upsert_worker(WORKER | {"worker_id": worker_id})
    for worker_id, blocks in ((1, 1), (1, 1), (1, 1), (2, 6)):
        name = f"r{len(names)}"
        first = 1000 * len(names)
        names.append(name)
        await service.create_reservation(
            {
                "selection_id": name,
                "worker_id": worker_id,
                "token_ids": list(range(first, first + 16 * blocks)),
                "effective_prefill_tokens": 0,
            }
        )
    asked = {"token_ids": list(range(90_000, 90_032))}
    assert (await service.select(asked))["worker_id"] == chosen
    ignored = {"router_config_override": {"decode_active_request_weight": 10.0}}
    assert (await service.select(asked | ignored))["worker_id"] == chosen, "as there"
    await service.shutdown_async()


async def test_two_stay_in_step_by_our_own_sync() -> None:
    """Without anybody's broadcast: what one books, computes and frees, the other carries."""
    with free_base((0, 1)) as base:
        ports = base, base + 1
    pair = [
        SelectionService(replica_sync_port=own, replica_sync_peers=[f"tcp://127.0.0.1:{other}"])
        for own, other in (ports, reversed(ports))
    ]
    first, second = pair
    try:
        for one in pair:
            await one.upsert_worker(WORKER)
        # what is published before somebody listens is lost: no snapshots are served here
        await until(lambda: all(peers_known(one) for one in pair))
        await first.select_and_reserve({"selection_id": "r", "token_ids": TOKENS})
        await second.create_reservation(
            {"selection_id": "s", "worker_id": 1, "token_ids": TOKENS[:32]}
        )
        await until(lambda: loads(first) == loads(second) == [96, 4, 2])
        await second.prefill_complete("r")
        await until(lambda: loads(first) == loads(second) == [32, 4, 2])
        await first.free_reservation("s")
        await second.free_reservation("r")
        await until(lambda: loads(first) == loads(second) == [0, 0, 0])
    finally:
        for one in pair:
            await one.shutdown_async()


def test_prompts_that_share_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"router_config_override": {"assume_kv_reuse": False}}
    together = {"router_config_override": {"assume_kv_reuse": True}}

    async def play(first: dict[str, Any], more: dict[str, Any]) -> list[int]:
        service = SelectionService()
        await service.upsert_worker(WORKER)
        for number, said in enumerate((first, more)):
            asked = {"token_ids": TOKENS, "selection_id": str(number), **said}
            assert len((await service.select_and_reserve(asked))["sequence_hashes"]) == 4
        carried = loads(service)
        await service.shutdown_async()
        return carried

    assert run(play({}, {})) == [128, 4, 2]
    assert run(play({}, alone)) == [128, 8, 2]
    monkeypatch.setenv("DYN_ROUTER_ASSUME_KV_REUSE", "false")
    assert run(play({}, {})) == [128, 8, 2]
    assert run(play(together, together)) == [128, 4, 2]
