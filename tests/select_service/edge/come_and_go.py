"""A thousand scopes come and go, and again: what stays of them, in a process of its own.

`python -m tests.select_service.edge.come_and_go TURNS` prints a line of JSON per turn. Beside other
tests the resident set says what those have left, not this.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path

import msgspec

from select_service.edge import garbage_collection
from select_service.edge.driver.driver import Driver
from tests.select_service.edge.serving import add_worker, app_client
from tests.wait import until

SCOPES = 1000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096


async def come_and_go(service: Driver, now: float, others: int) -> float:
    for number in range(SCOPES):
        add_worker(service, number, model_name=f"m{number}")
    for number in range(SCOPES):
        service.delete_worker(number)
    more = True
    while more or service.core.partitions:
        now += 11.0
        more = service.core.tick(now)[0]
    await asyncio.sleep(0)  # their sockets begin to close
    await until(lambda: len(asyncio.all_tasks()) == others)
    return now


async def main(turns: int) -> None:
    async with app_client() as (_, service):
        now = asyncio.get_running_loop().time() + 1e6  # beyond what housekeeping sees
        service.core.limits.scope_linger_s = 0.0
        others, trim = len(asyncio.all_tasks()), garbage_collection._trimmer()
        for _turn in range(turns):
            now = await come_and_go(service, now, others)
            gc.collect()
            trim(0)  # as the service does when it is quiet
            measured = {"bytes": resident_bytes(), "objects": len(gc.get_objects())}
            sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
