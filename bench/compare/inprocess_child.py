"""The process of W11: a service in this interpreter, asked over stdin what to measure.

Runs under our interpreter and under the peer's, so it imports nothing but the standard library and
the service it measures. A line in: JSON with `do`; a line out: JSON. What logs to stdout is sent to
stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from importlib import import_module
from typing import Any, Protocol

__all__ = ["main"]


class _Service(Protocol):
    """Both in-process interfaces, as this workload needs them."""

    async def register(self, worker: dict[str, Any]) -> None: ...

    async def select(self, prompt: dict[str, Any]) -> tuple[int, int]: ...

    async def lifecycle(self, prompt: dict[str, Any], name: str) -> tuple[int, int]: ...


class _Ours:
    """`select_service.SelectionService`."""

    def __init__(self) -> None:
        self._names = import_module("select_service")
        self._service = self._names.SelectionService()

    async def register(self, worker: dict[str, Any]) -> None:
        """Enter the context with the first worker."""
        if worker["worker_id"] == 1:
            await self._service.__aenter__()
        await self._service.upsert_worker(self._names.WorkerSpec(**worker))

    async def select(self, prompt: dict[str, Any]) -> tuple[int, int]:
        """The worker, and the tokens left to prefill."""
        answer = await self._service.select(self._names.SelectRequest(**prompt))
        return answer.worker_id, answer.effective_prefill_tokens

    async def lifecycle(self, prompt: dict[str, Any], name: str) -> tuple[int, int]:
        """Book, complete, free."""
        request = self._names.SelectAndReserveRequest(**prompt, reservation_id=name)
        answer = await self._service.select_and_reserve(request)
        await self._service.prefill_complete(name)
        await self._service.free(name)
        return answer.worker_id, answer.effective_prefill_tokens


class _Peer:
    """`SelectionService` of the reference's binding, which takes and gives dictionaries."""

    def __init__(self) -> None:
        self._service: Any = None

    async def register(self, worker: dict[str, Any]) -> None:
        """The service is made on the loop that uses it."""
        if self._service is None:
            self._service = import_module("dynamo._core").SelectionService()
        await self._service.upsert_worker(worker)

    async def select(self, prompt: dict[str, Any]) -> tuple[int, int]:
        """The worker, and the tokens left to prefill."""
        answer = await self._service.select({**prompt})
        return answer["worker_id"], answer["effective_prefill_tokens"]

    async def lifecycle(self, prompt: dict[str, Any], name: str) -> tuple[int, int]:
        """Book, complete, free; the name is that of both generations of the interface."""
        answer = await self._service.select_and_reserve(
            {**prompt, "selection_id": name, "reservation_id": name}
        )
        await self._service.prefill_complete(name)
        await self._service.free_reservation(name)
        return answer["worker_id"], answer["effective_prefill_tokens"]


class _Bench:
    def __init__(self, service: _Service, setup: dict[str, Any]) -> None:
        self._service = service
        self._setup = setup
        self._prompts = setup["prompts"]
        self._done = 0

    async def prepare(self) -> None:
        for worker in self._setup["workers"]:
            await self._service.register(worker)

    async def measure(self, do: str, count: int, callers: int) -> dict[str, Any]:
        """So many operations by callers that take turns at the loop; every answer is checked."""
        numbers = iter(range(self._done, self._done + count))
        self._done += count
        lifecycle = do == "lifecycle"
        wrong: list[str] = []
        workers = {worker["worker_id"] for worker in self._setup["workers"]}

        async def call() -> None:
            for number in numbers:
                prompt = self._prompts[number % len(self._prompts)]
                if lifecycle:
                    answer = await self._service.lifecycle(prompt, f"bench-{number:010}")
                else:
                    answer = await self._service.select(prompt)
                if answer[0] not in workers or answer[1] != prompt["isl_tokens"]:
                    wrong.append(repr(answer))

        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*(call() for _ in range(callers)))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return {"cpu_s": cpu, "wall_s": wall, "wrong": wrong[:3]}


async def _serve(service: _Service, answers: int) -> None:
    loop = asyncio.get_running_loop()
    bench: _Bench | None = None
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        if bench is None:
            bench = _Bench(service, order)
            await bench.prepare()
            answer: dict[str, Any] = {"ready": True}
        else:
            answer = await bench.measure(order["do"], order["count"], order["callers"])
        os.write(answers, json.dumps(answer).encode() + b"\n")
    os._exit(0)  # without the peer's good-byes, which may take long


def main(which: str) -> None:
    """Serve until stdin ends; `which` is `ours` or `peer`."""
    answers = os.dup(1)
    os.dup2(2, 1)
    asyncio.run(_serve(_Ours() if which == "ours" else _Peer(), answers))


if __name__ == "__main__":
    main(sys.argv[1])
