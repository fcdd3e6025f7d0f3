"""The play before the real service: clients, workers and their reports, over HTTP in wall time.

Model seconds pass in `time_scale` wall seconds each; what is sent and reported in seconds is
scaled. The calls of a reservation's life go out in batches, as a busy proxy would send them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import orjson

from bench.admission.measures import Result, measure
from bench.admission.play import Play, Script
from bench.load.calls import Calls, Reply
from bench.load.http import BadAnswer, request_bytes

if TYPE_CHECKING:
    from bench.admission.worker import Happening
    from bench.admission.workload import Client

__all__ = ["LiveRun", "Traffic", "play_live"]

_FLUSH_EVERY_S = 0.02
_REPORT_EVERY_S = 0.1
_BATCH_MAX = 5_000
_WAKE_EARLY_S = 0.0005  # timers of the loop are that coarse
_OPERATIONS = {"first_token": "prefill_complete", "block": "output_block", "done": "free"}


class Traffic(NamedTuple):
    """What a live run put the service and this process to."""

    wall_s: float
    calls: int
    attempts: int
    refused_operations: int  # lifecycle calls the service did not accept; must be 0
    client_cpu_s: float
    has_reports: bool  # whether the service takes workers' own reports
    counted: dict[str, int]  # by the service itself, all classes; empty: it has no gate

    @property
    def is_conserved(self) -> bool:
        """Whether the service accounts for all requests."""
        counted = self.counted
        if not counted:
            return True
        ends = ("admitted", "refused", "withdrawn", "waiting")
        return counted["offered"] == sum(counted[one] for one in ends) <= self.attempts


class LiveRun:
    """One play against a service that has no workers yet."""

    def __init__(
        self, address: tuple[str, int], script: Script, *, time_scale: float = 1.0
    ) -> None:
        self.play = Play(script)
        self.refused_at: list[tuple[float, str]] = []
        self._calls = Calls(address)
        self._scale = time_scale
        self._started = 0.0
        self._changed = asyncio.Event()
        self._operations: list[dict[str, object]] = []
        self._attempts: set[asyncio.Task[None]] = set()
        self._attempted = 0
        self._refused_operations = 0
        self._has_reports = False

    @property
    def now(self) -> float:
        """Model seconds since the start."""
        return (time.monotonic() - self._started) / self._scale

    async def run(self) -> tuple[Result, Traffic]:
        """Play it to its end."""
        await self._register()
        self._started = time.monotonic()
        cpu_s = time.process_time()
        try:
            async with asyncio.TaskGroup() as group:
                keepers = [group.create_task(self._flush())]
                if self._has_reports:
                    keepers.append(group.create_task(self._report()))
                await self._play(group)
                counted = await self._counted()
                for task in (*keepers, *self._attempts):
                    task.cancel()
        finally:
            self._calls.close()
        traffic = Traffic(
            time.monotonic() - self._started,
            self._calls.calls,
            self._attempted,
            self._refused_operations,
            time.process_time() - cpu_s,
            self._has_reports,
            counted,
        )
        return measure(self.play, self.refused_at), traffic

    async def _register(self) -> None:
        settings = self.play.script.settings
        for worker_id in self.play.workers:
            reply = await self._calls.call(
                _post(
                    "/workers",
                    {
                        "worker_id": worker_id,
                        "endpoint": f"http://127.0.0.1:{9000 + worker_id}",
                        "block_size": settings.block_size,
                        "max_num_batched_tokens": settings.step_tokens_max,
                        "total_kv_blocks": settings.kv_blocks,
                    },
                )
            )
            if reply.status >= 400:
                raise BadAnswer(f"worker {worker_id}: {reply.status} {reply.body!r:.300}")
        first = next(iter(self.play.workers))
        reply = await self._calls.call(self._report_of(first))
        self._has_reports = reply.status < 300
        if not self._has_reports and reply.status not in {404, 405}:
            raise BadAnswer(f"report of a worker: {reply.status} {reply.body!r:.300}")

    # -- the play ------------------------------------------------------------------------------

    async def _play(self, group: asyncio.TaskGroup) -> None:
        play = self.play
        while not play.is_over(now := self.now):
            sends = play.advance(now)
            self._operations += map(_operation, sends.tellings)
            for client in sends.attempts:
                task = group.create_task(self._attempt(client))
                self._attempts.add(task)
                task.add_done_callback(self._attempts.discard)
            self._changed.clear()
            left_s = (play.next_event() - self.now) * self._scale - _WAKE_EARLY_S
            try:
                async with asyncio.timeout(max(0.0, left_s)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _attempt(self, client: Client) -> None:
        self._attempted += 1
        try:
            reply = await self._calls.call(self._request(client))
        except (BadAnswer, OSError) as error:
            self.play.failed(client, str(error))
            return
        now = self.now
        if reply.status == 200:
            self.play.admitted(client, orjson.loads(reply.body)["worker_id"], now)
        elif reply.status in {429, 503, 529}:
            self._note_refusal(client, reply, now)
        else:
            self.play.failed(client, f"{reply.status} {reply.body!r:.200}")
        self._changed.set()

    def _note_refusal(self, client: Client, reply: Reply, now: float) -> None:
        self.refused_at.append((now, client.slo_class))
        header = reply.headers.get("retry-after")
        retry_after_s = None if header is None else int(header) / self._scale
        self.play.refused(client, _reason(reply), retry_after_s, now)

    def _request(self, client: Client) -> bytes:
        rng = Random(client.number)  # no prefix is shared: the same prompt only when it returns
        blocks = client.tokens // self.play.script.settings.block_size
        hashes = [rng.getrandbits(63) for _ in range(blocks)]
        return _post(
            "/select_and_reserve",
            {
                "reservation_id": _name(client),
                "block_hashes": hashes,
                "sequence_hashes": hashes,
                "isl_tokens": client.tokens,
                "expected_output_tokens": (
                    client.output_tokens if self.play.script.tells_answers else None
                ),
                "slo_class": client.slo_class,
                "slo_ttft_ms": client.target_s * self._scale * 1e3,
                "fairness_id": client.tenant_id,
            },
        )

    # -- what workers and proxies send ---------------------------------------------------------

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_EVERY_S)
            while self._operations:
                batch = self._operations[:_BATCH_MAX]
                del self._operations[: len(batch)]
                reply = await self._calls.call(_post("/reservations/batch", {"operations": batch}))
                if reply.status != 200:
                    raise BadAnswer(f"batch: {reply.status} {reply.body!r:.300}")
                results = orjson.loads(reply.body)["results"]
                self._refused_operations += sum(one["status"] != 200 for one in results)

    async def _report(self) -> None:
        while True:
            for worker_id in self.play.workers:
                reply = await self._calls.call(self._report_of(worker_id))
                if reply.status >= 300:
                    raise BadAnswer(f"report: {reply.status} {reply.body!r:.300}")
                await asyncio.sleep(_REPORT_EVERY_S / len(self.play.workers))

    async def _counted(self) -> dict[str, int]:
        """Ask the service what became of all, while some still wait."""
        reply = await self._calls.call(request_bytes("GET", "/admission"))
        if reply.status != 200:
            return {}
        sums = Counter[str]()
        for counts in orjson.loads(reply.body)["counters"].values():
            sums.update(counts)
        return dict(sums) if sums["offered"] else {}

    def _report_of(self, worker_id: int) -> bytes:
        worker = self.play.workers[worker_id]
        rank = {
            "dp_rank": 0,
            "kv_used_blocks": worker.blocks_used,
            "kv_total_blocks": worker.settings.kv_blocks,
            "num_requests_waiting": len(worker.waiting),
            "num_requests_running": worker.running,
        }
        return _post(f"/workers/{worker_id}/metrics", {"ranks": [rank]})


def play_live(
    address: tuple[str, int], script: Script, *, time_scale: float = 1.0
) -> tuple[Result, Traffic]:
    """Play a script before the service at an address."""

    async def play() -> tuple[Result, Traffic]:
        return await LiveRun(address, script, time_scale=time_scale).run()

    return asyncio.run(play())


def _name(client: Client) -> str:
    return f"client-{client.number}"


def _operation(happening: Happening) -> dict[str, object]:
    client, kind = happening
    return {"op": _OPERATIONS[kind], "reservation_id": _name(client)}


def _reason(reply: Reply) -> str:
    """Return the stable text; the message where there is none."""
    body: dict[str, Any] = orjson.loads(reply.body)
    return str(body.get("reason") or body.get("code") or body.get("error"))


def _post(path: str, body: object) -> bytes:
    return request_bytes("POST", path, msgspec.json.encode(body))
