"""What the client costs: `python -m bench.micro.client [--lifecycles N] [--side-by-side 1,8,32]`.

CPU microseconds of the *client's* process per lifecycle (reserve, prefill_complete, one block of
output, free) of a 512-token prompt over a Unix socket, and requests per lifecycle: what is told is
batched, so it falls when more runs side by side. `AsyncClient`, and `Client` in as many threads.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from select_service import WorkerSpec
from select_service.client import AsyncClient, Client

TOKENS = list(range(512))
WORKERS = 16
WARM_UP = 50
ROUNDS = 3


async def asynchronous(where: str, lifecycles: int, side_by_side: int) -> tuple[float, float]:
    async with AsyncClient(where) as client:

        async def live(count: int) -> None:
            for _ in range(count):
                async with client.reserve(token_ids=TOKENS) as r:
                    r.prefill_complete()
                    r.output_tokens(16)

        await live(WARM_UP)
        before, begun = client.stats()["requests"], time.process_time()
        each = lifecycles // side_by_side
        await asyncio.gather(*(live(each) for _ in range(side_by_side)))
        await client.flush()
        spent = time.process_time() - begun
        done = each * side_by_side
        return spent / done * 1e6, (client.stats()["requests"] - before) / done


def in_threads(where: str, lifecycles: int, side_by_side: int) -> tuple[float, float]:
    with Client(where) as client:

        def live(count: int) -> None:
            for _ in range(count):
                with client.reserve(token_ids=TOKENS) as r:
                    r.prefill_complete()
                    r.output_tokens(16)

        live(WARM_UP)
        before, begun = client.stats()["requests"], time.process_time()
        each = lifecycles // side_by_side
        threads = [threading.Thread(target=live, args=(each,)) for _ in range(side_by_side)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.flush()
        spent = time.process_time() - begun
        done = each * side_by_side
        return spent / done * 1e6, (client.stats()["requests"] - before) / done


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lifecycles", type=int, default=2000)
    parser.add_argument("--side-by-side", default="1,8,32")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/s"
        command = [sys.executable, "-m", "select_service", "--uds", path]
        service = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not Path(path).exists():
            time.sleep(0.02)
        where = f"unix:{path}"
        with Client(where) as client:
            for number in range(WORKERS):
                client.upsert_worker(
                    WorkerSpec(
                        worker_id=number,
                        endpoint=f"http://w{number}",
                        block_size=16,
                        kv_events_endpoint=f"tcp://127.0.0.1:{number + 1}",
                    )
                )
        for count in map(int, chosen.side_by_side.split(",")):
            for name in ("AsyncClient", "Client"):
                rounds = []
                for _ in range(ROUNDS):
                    if name == "Client":
                        rounds.append(in_threads(where, chosen.lifecycles, count))
                    else:
                        run = asynchronous(where, chosen.lifecycles, count)
                        rounds.append(asyncio.run(run))
                cpu = statistics.median(one[0] for one in rounds)
                requests = statistics.median(one[1] for one in rounds)
                print(
                    f"{name:12} {count:3} side by side: {cpu:7.0f} µs of CPU a lifecycle,"
                    f" {requests:.2f} requests"
                )
        service.terminate()
        service.wait()


if __name__ == "__main__":
    main()
