"""What `select-sim` does with a `kv_source`: who pulls how much, from where, in what time."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from indexer.types import Tier, WorkerRank
from select_service.simulator.core.core_router import CoreRouter, CoreSettings
from select_service.simulator.core.engine_settings import SimulatedPool
from select_service.simulator.core.routers import Placed, RoundRobinRouter
from select_service.simulator.core.worker import EngineWorker
from select_service.types import RouterConfig
from tests.select_service.simulator.core.engines import BLOCK, SMALL, played, request

if TYPE_CHECKING:
    from select_service.simulator.core.requests import ClientRequest
    from select_service.simulator.core.routers import Verdict

HOST = replace(SMALL, host_tokens=4_000, host_token_s=0.0)
ISL, MOVING_S, READING_S = 40, 1e-3, 1e-2


class _Sends(RoundRobinRouter):
    """The last request pulls its prompt from the first worker; the others go there."""

    def route(self, key: str, request: ClientRequest, now: float) -> Verdict | None:
        first, second = sorted(self._in_flight)
        placed = Placed(first)
        if request.number == 2:
            placed = Placed(second, source_worker_id=first, pulled_blocks=ISL // BLOCK)
        return self._place(key, request, placed, [placed.worker_id])


@pytest.mark.parametrize("is_lost", [False, True], ids=["on the device", "below it"])
def test_blocks_in_the_memory_below_a_device_are_read_before_they_are_moved(
    *, is_lost: bool
) -> None:
    taken = []
    for reading_s in (0.0, READING_S):
        engine = replace(HOST, host_token_s=reading_s)
        pools = {"workers": SimulatedPool("aggregated", engine)}
        others = 156 if is_lost else 4  # all that the device has room for
        requests = [
            request(0, 0.0, ISL, 4, first=0),
            request(1, 10.0, others, 4),
            request(2, 30.0, ISL, 4, first=0),
        ]
        router = _Sends(random.Random(1))
        cluster = played(router, requests, 2, pools=pools, transfer_token_s=MOVING_S)
        pulled = next(one for one in cluster.outcomes if one.request.number == 2)
        assert pulled.cached_tokens == ISL - BLOCK, "the last block is computed in any case"
        taken.append(pulled.ttft_s)
    read = ISL * READING_S if is_lost else 0.0
    assert taken[1] - taken[0] == pytest.approx(read)


def test_who_holds_some_below_its_device_pulls_what_comes_after() -> None:
    """The source's blocks follow those on all tiers of the rank that pulls."""
    config = RouterConfig(kv_pull=True, kv_transfer_cost_per_block=0.01)
    router = CoreRouter(CoreSettings(config), [random.Random(1)])
    for worker_id in (1, 2):
        router.add(EngineWorker(worker_id, SMALL, BLOCK), 0.0)
    (index,) = router._indexes.values()
    asked = request(0, 0.0, ISL, 4)
    chain = asked.blocks[: ISL // BLOCK]
    index.store(WorkerRank(1, 0), Tier.DEVICE, None, chain, chain.tobytes())
    here = chain[:3]
    index.store(WorkerRank(2, 0), Tier.HOST_PINNED, None, here, here.tobytes())
    for number in range(1, 5):
        router.route(f"busy{number}", request(number, 0.0, 4 * ISL, 4), 0.0)
    for key in [f"busy{number}" for number in range(1, 5)]:
        if router._home[key].core.lifecycle.bookings.get(key).reservation.slot == 1:
            router.finished(key, 0.0)
    placed = router.route("asked", asked, 0.0)
    assert isinstance(placed, Placed)
    assert (placed.worker_id, placed.source_worker_id) == (2, 1)
    assert placed.pulled_blocks == len(chain)


def test_the_prefill_worker_of_a_pair_pulls() -> None:
    config = RouterConfig(kv_pull=True, kv_transfer_cost_per_block=0.01)
    router = CoreRouter(CoreSettings(config), [random.Random(1)])
    for worker_id, role in ((1, "prefill"), (2, "decode")):
        router.add(EngineWorker(worker_id, SMALL, BLOCK, role), 0.0)  # type: ignore[arg-type]
    asked = request(0, 0.0, ISL, 4)
    chain = asked.blocks[: ISL // BLOCK - 1]  # with all, it would do without the other
    (index,) = router._indexes.values()
    index.store(WorkerRank(2, 0), Tier.DEVICE, None, chain, chain.tobytes())
    placed = router.route("asked", asked, 0.0)
    assert isinstance(placed, Placed)
    assert (placed.worker_id, placed.prefill_worker_id) == (2, 1)
    assert (placed.source_worker_id, placed.pulled_blocks) == (2, len(chain))
