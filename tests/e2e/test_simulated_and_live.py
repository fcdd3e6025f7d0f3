"""One history twice: simulated, and lived through HTTP, events and engines in real time.

The engines of the live run are the simulator's own, in real time (the demo's): what the runs do not
share is the way between them and the core of the service, with its delays. Their hit rates must be
within five points.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from select_service.demo.client import SelectorClient
from select_service.demo.engine import DemoJob, StepLimits
from select_service.demo.service_process import ServiceProcess
from select_service.demo.worker import EngineShape, Milestone, SimulatedWorker
from select_service.simulator.core.requests import OK, ClientRequest, RequestOutcome, Workload
from select_service.simulator.core.workloads import WorkloadSettings, workload_of
from select_service.simulator.runs import run
from select_service.simulator.settings import EngineSpec, SimulationSettings

BLOCK = 16
WORKERS = 4
STEP_S = 0.02
PREFILL_TOKENS = 256
SHAPE = EngineShape(
    blocks=220,
    block_size=BLOCK,
    step_s=STEP_S,
    speed=StepLimits(PREFILL_TOKENS, decode_tokens_per_step=1, running_max=16),
)
CHAT = WorkloadSettings(
    rate=4.0,
    requests=200,
    prompts=6,
    prompt_tokens=160,
    turn_tokens=60,
    output_tokens=30,
    turns=3.0,
    think_s=0.7,
)
WITHIN = 0.05
LATE_S = 0.1
"""Mean time to be placed beyond which the machine, and not the fleet, decides what happens."""


def simulated(policy: str) -> float:
    """Hit rate of engines whose steps take as long as those of the demo."""
    engine = EngineSpec(
        kv_tokens=SHAPE.blocks * BLOCK,
        step_tokens_max=PREFILL_TOKENS,
        sequences_max=16,
        base_s=STEP_S,
        prefill_token_s=0.0,
        prefill_pair_s=0.0,
        sequence_s=0.0,
        kv_token_s=0.0,
    )
    settings = SimulationSettings(
        policy=policy, workloads=[CHAT], workers=WORKERS, block_size=BLOCK, engine=engine
    )
    return run(settings).hit_rate


def tokens_of(request: ClientRequest, count: int) -> list[int]:
    """The text behind the names of blocks: equal where they are."""
    tokens = []
    for at in range(count):
        block, place = divmod(at, BLOCK)
        known = block < len(request.blocks)
        name = request.blocks[block] if known else -1 - request.number
        tokens.append((name * 2_654_435_761 + place * 40_503) % 50_000)
    return tokens


@dataclass
class Life:
    """The same requests, each at its time, against a service and engines that take theirs."""

    client: SelectorClient
    workload: Workload
    workers: dict[int, SimulatedWorker] = field(default_factory=dict)
    cached: int = 0
    prompted: int = 0
    ended: int = 0
    placing_s: float = 0.0  # from the times requests were due until they had a worker

    async def live(self) -> None:
        self.workers = {number: SimulatedWorker(number, SHAPE) for number in range(1, WORKERS + 1)}
        try:
            async with asyncio.TaskGroup() as engines:
                running = [engines.create_task(paced(one)) for one in self.workers.values()]
                for one in self.workers.values():
                    await self._register(one)
                self.start = asyncio.get_running_loop().time()
                async with asyncio.TaskGroup() as requests:
                    while (request := self.workload.next()) is not None:
                        await self._until(request.arrival)
                        requests.create_task(self._session(request))
                for task in running:
                    task.cancel()
        finally:
            for one in self.workers.values():
                one.close()
            await self.client.close()

    async def _register(self, worker: SimulatedWorker) -> None:
        record = {
            "worker_id": worker.worker_id,
            "endpoint": "http://engine.invalid",
            "block_size": BLOCK,
            "kv_events_endpoint": worker.kv_events_endpoint,
            "replay_endpoint": worker.replay_endpoint,
            "max_num_batched_tokens": PREFILL_TOKENS,
            "total_kv_blocks": SHAPE.blocks,
        }
        assert await self.client.register(record) == "schedulable"

    async def _until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, self.start + when - asyncio.get_running_loop().time()))

    async def _session(self, request: ClientRequest) -> None:
        ahead = [request]
        while ahead:
            one = ahead.pop()
            await self._until(one.arrival)
            await self._serve(one)
            now = asyncio.get_running_loop().time() - self.start
            ahead += self.workload.after(RequestOutcome(one, OK, now))

    async def _serve(self, request: ClientRequest) -> None:
        text = tokens_of(request, request.isl + request.osl)
        name = str(request.number)
        booking = await self.client.select_and_reserve(
            name, text[: request.isl], expected_output_tokens=request.osl
        )
        now = asyncio.get_running_loop().time() - self.start
        self.placing_s += now - request.arrival
        job = DemoJob(name, text[: request.isl], text[request.isl :])
        progress = self.workers[booking.worker_id].submit(job)
        while (milestone := await progress.milestones.get()) is not Milestone.FINISHED:
            assert milestone is not Milestone.LOST
            if milestone is Milestone.PREFILLED:
                cached = progress.cached_blocks * BLOCK
                await self.client.prefill_complete(name, cached)
                self.cached += cached
                self.prompted += request.isl
        await self.client.free(name)
        self.ended += 1


async def paced(worker: SimulatedWorker) -> None:
    """Step every `STEP_S` of real time, and catch up after a time without a processor."""
    clock = asyncio.get_running_loop().time
    due = clock()
    while True:
        worker.publisher.serve_replay()
        while due <= clock():
            if not worker.engine.idle:
                worker._settle(worker.engine.step())
            due += STEP_S
        await asyncio.sleep(due - clock())


def lived() -> Life:
    """Live once; on a machine that has no time for it, that says nothing."""
    life = asyncio.run(live())
    late_s = life.placing_s / life.ended
    if late_s > LATE_S:
        pytest.skip(f"this machine is too busy: requests wait {late_s:.2f} s for an answer")
    return life


async def live() -> Life:
    async with ServiceProcess() as service:
        client = SelectorClient(service.url, model_name="default")
        rng = random.Random("1/workload/0")  # as the first run has it
        life = Life(client, workload_of([CHAT], BLOCK, [rng]))
        await life.live()
        return life


@pytest.mark.e2e
@pytest.mark.heavy
def test_life_is_as_it_was_simulated() -> None:
    predicted = simulated("kv-cost")
    life = lived()
    found = life.cached / life.prompted
    assert life.ended == CHAT.requests
    assert 0.2 < predicted < 0.9, "caches are neither useless nor endless"
    assert found == pytest.approx(predicted, abs=WITHIN)
    assert simulated("random") < predicted - WITHIN, "which another policy would not have predicted"
