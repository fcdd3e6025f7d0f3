"""What a request costs without its socket: `python -m bench.micro.http_request [ROW ...]`.

The protocol class of the server, fed with the bytes of the workloads in this process, its answers
thrown away: no kernel, no loop, no second process whose turn it might be. Prints CPU µs per
operation, the quietest and the median of many short rounds, the rows in turn, and instructions
where they can be counted; with SELECT_SERVICE_PURE=1 those of the plain twins. `--profile ROW`
shows where the time goes. Two rows are of requests as a fleet sends them and no target is of:
`lengths`, prompts of three thousand lengths under heads that a proxy has put something into, and
`override`, with weights of their own and an unknown member; so are those of `variations.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
from random import Random
from statistics import median
from time import process_time
from typing import TYPE_CHECKING, cast

from typing_extensions import override
from uvicorn import Config
from uvicorn.server import ServerState

from bench.compare.lifecycles import PrefixSharing, Reordered, Unshared, lifecycles, stand
from bench.compare.target import MODEL, NEVER_BUSY
from bench.compare.workloads import Overlap, overlapping, ring_of_prompts, selections
from bench.load.chains import fresh_chains
from bench.load.http import request_bytes
from bench.load.prompts import BLOCK_SIZE, Prompt, body
from bench.micro.instructions import instruction_counter
from bench.micro.variations import FRESH, VARIATIONS, variation
from indexer.core.hashing import block_hashes
from indexer.core.packing import pack_u64
from indexer.types import Scope, Tier, WorkerRank
from select_service.edge.app import create_application, create_driver
from select_service.edge.http.connection import HttpConnection
from select_service.edge.http.connection_limits import ConnectionLimits
from select_service.edge.server import http_protocol
from select_service.settings import Settings
from select_service.types import WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.compare.lifecycles import Content
    from bench.load.http import Operation
    from indexer.core.index import KvIndex
    from select_service.edge.driver.driver import Driver

LENGTHS, OVERRIDE = "lengths", "override"
SHARING = PrefixSharing()
LIFECYCLES: dict[str, Content] = {
    "W4": Unshared(),
    "W4-shared": SHARING,
    "W4-repeats": Reordered(),
}
ROWS = (
    *("W1@512", "W1@2048", "W1@8192", "W2@2048", "W2@8192", "W3@2048"),
    *(*LIFECYCLES, "W5@256", "W5@1024", LENGTHS, OVERRIDE),
    *VARIATIONS,
)
_LENGTHS = 3000
_OVERRIDE = {"router_config_override": {"overlap_score_weight": 2.0}, "request_type": "chat"}


_executed = instruction_counter() or int  # which says 0


class _Nowhere(asyncio.Transport):
    """Takes answers; the last one is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written = bytes(data)

    @override
    def get_write_buffer_size(self) -> int:
        return 0

    @override
    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 1) if name.endswith("name") else default

    @override
    def is_closing(self) -> bool:
        return False

    @override
    def close(self) -> None:
        """Nothing is at the other end."""

    @override
    def pause_reading(self) -> None:
        """Nothing more comes."""

    @override
    def resume_reading(self) -> None:
        """Nothing waits."""


class Rig:
    """A service with the workers of one row, and a connection to it."""

    def __init__(
        self,
        row: str,
        service: Driver,
        connected: Callable[[], HttpConnection],
        operation: Callable[[int], Operation],
    ) -> None:
        self.row, self.service = row, service
        self._connected, self.lane = connected, connected()
        self.operation = operation
        self._number = 0
        self.times: list[float] = []
        self.instructions: list[float] = []

    def run(self, count: int) -> None:
        """Carry out operations and note what one has cost."""
        operations = [self.operation(self._number + one) for one in range(count)]
        self._number += count
        executed = _executed()
        start = process_time()
        for operation in operations:
            if self.row == FRESH:
                self.lane.connection_lost(None)
                self.lane = self._connected()
            receive = self.lane.data_received
            for part in operation:
                receive(part)
            if self.row == FRESH:
                self.lane.flush()
        self.times.append((process_time() - start) / count * 1e6)
        self.instructions.append((_executed() - executed) / count)
        self.lane.flush()
        if not self.answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{self.row}: {self.answer[:300]!r}")

    @property
    def answer(self) -> bytes:
        """The bytes of the last answer."""
        return cast("_Nowhere", self.lane.transport).written


async def rig_of(row: str) -> Rig:
    """Build a service for a row, as far as it does not need a network.

    Raises KeyError for a row that is none of ROWS.
    """
    if row not in ROWS:
        raise KeyError(f"{row} is none of {', '.join(ROWS)}")
    kind, _, size = row.partition("@")
    workers = int(size) if kind == "W5" else 16
    isl = int(size) if size and kind != "W5" else 2048
    settings = Settings(host="127.0.0.1", port=0)
    driver = create_driver(settings)
    await driver.start()
    for worker_id in range(1, workers + 1):
        spec = WorkerSpec(worker_id=worker_id, endpoint="http://w", model_name=MODEL)
        spec.block_size, spec.max_num_batched_tokens = 16, NEVER_BUSY
        spec.kv_events_endpoint = "tcp://127.0.0.1:9"
        driver.upsert_worker(spec)
    application, traffic = create_application(driver, settings)
    limits = ConnectionLimits(60.0, 60.0, 1000, 65536, 128, 1000, 1000, 1 << 30, 0)
    made = http_protocol(application, limits, traffic.connections)
    config = Config(application, ws="none", lifespan="off", log_config=None, access_log=False)
    state = ServerState()

    def connected() -> HttpConnection:
        lane = made(config, state, {})
        lane.connection_made(_Nowhere())
        return lane

    lane = connected()
    index = driver.core.partitions[Scope(MODEL, "default")].index
    return Rig(row, driver, connected, _operation(row, isl, range(1, workers + 1), index, lane))


def _operation(
    row: str, isl: int, ids: range, index: KvIndex, lane: HttpConnection
) -> Callable[[int], Operation]:
    """Prepare what a row's workers hold and what stands; return what makes its operations."""
    kind = row.partition("@")[0]
    if row in LIFECYCLES:
        content = LIFECYCLES[row]
        if content is SHARING:
            overlap = Overlap(row, isl, 0, families=SHARING.families)
            _fill(index, SHARING.indexed_blocks - overlap.blocks)
            _hold(index, overlap, ids)
        for request in stand(content.prompts(isl, 256, "standing")):
            lane.data_received(request)
        return lifecycles(content, ids, isl, 64)[0]
    if kind == "W2":
        overlap = Overlap(row, isl, 0)
        _hold(index, overlap, ids)
        requests, _expected = overlapping(overlap)
        return lambda number: requests[number % len(requests)]
    if kind in VARIATIONS:
        lane.data_received(variation(FRESH, isl)(0)[0])  # so that its head is known
        return variation(kind, isl)
    if kind in {LENGTHS, OVERRIDE}:
        return _in_turn(varied(isl) if kind == LENGTHS else overriding(isl))
    return selections(ids, isl, 64, tokens=kind == "W3")[0]


def _hold(index: KvIndex, overlap: Overlap, ids: range) -> None:
    """Let the workers hold what they hold in W2."""
    for family, prompt in enumerate(overlap.families_prompts()):
        for worker_id, held in overlap.held(ids, family).items():
            names, hashes = prompt.sequence_hashes[:held], pack_u64(prompt.block_hashes[:held])
            index.store(WorkerRank(worker_id, 0), Tier.DEVICE, None, names, hashes)


def _fill(index: KvIndex, blocks: int) -> None:
    """Let worker 1 hold chains that are not asked for."""
    for chain in fresh_chains("filling", blocks // 512, 512):
        hashes = block_hashes(chain.token_ids, BLOCK_SIZE)
        index.store(WorkerRank(1, 0), Tier.DEVICE, None, chain.hashes, hashes)


def _in_turn(requests: Iterator[bytes]) -> Callable[[int], Operation]:
    asked = [(one,) for one in requests]
    return lambda number: asked[number % len(asked)]


def varied(isl: int) -> Iterator[bytes]:
    """Prompts of up to twice as many tokens; no head is like another."""
    rng = Random(isl)
    prompts = ring_of_prompts(2 * isl, 8)
    for number in range(_LENGTHS):
        blocks = rng.randrange(4, 2 * isl // BLOCK_SIZE)
        whole = prompts[number % len(prompts)]
        hashes = whole.block_hashes[:blocks], whole.sequence_hashes[:blocks]
        prompt = Prompt(whole.token_ids[: blocks * BLOCK_SIZE + number % BLOCK_SIZE], *hashes)
        request = request_bytes("POST", "/select", body({"model_name": MODEL}, prompt.hash_form()))
        lines = f"X-Request-Id: {rng.getrandbits(128):032x}\r\nX-Forwarded-For: 10.0.0.{number}\r\n"
        yield request.replace(b"Host:", lines.encode() + b"Host:", 1)


def overriding(isl: int) -> Iterator[bytes]:
    """Requests with weights of their own, and a member that the API does not have."""
    for prompt in ring_of_prompts(isl, 64):
        fields = {"model_name": MODEL, **_OVERRIDE}
        yield request_bytes("POST", "/select", body(fields, prompt.hash_form()))


async def compare(rows: Sequence[str], rounds: int, count: int) -> None:
    """Run the rows in turn and print a table."""
    rigs = [await rig_of(row) for row in rows]
    for rig in rigs:
        rig.run(1500)
        rig.times.clear()
        rig.instructions.clear()
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for rig in rigs:
            rig.run(count)
    for rig in rigs:
        quarter = sorted(rig.times)[len(rig.times) // 4]
        print(
            f"{rig.row:9} least {min(rig.times):7.1f}  quarter {quarter:7.1f}"
            f"  median {median(rig.times):7.1f} µs"
            f"  instructions {median(rig.instructions) / 1e3:6.0f} k"
        )


async def profile(row: str, count: int) -> None:
    """Print what a row calls, by own time."""
    rig = await rig_of(row)
    rig.run(1500)
    gc.freeze()
    gc.disable()
    profiler = cProfile.Profile()
    profiler.enable()
    rig.run(count)
    profiler.disable()
    stats = pstats.Stats(profiler)
    stats.sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=ROWS)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--count", type=int, default=100, help="operations of a row in a round")
    parser.add_argument("--profile", metavar="ROW")
    chosen = parser.parse_args()
    if chosen.profile:
        asyncio.run(profile(chosen.profile, 20 * chosen.count))
    else:
        asyncio.run(compare(chosen.rows, chosen.rounds, chosen.count))


if __name__ == "__main__":
    main()
