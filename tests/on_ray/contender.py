"""A process that wants to act: joins the cluster, and reports every look at its lease.

Run as `python -m tests.on_ray.contender NAME DURATION_S`. A line is `held TIME` or `not TIME`, by
the monotonic clock of the machine, which all processes share.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from select_service.planner.edge.leases.ray_lease import RayLease
from select_service.planner.edge.ray_cluster import joined

LOOK_S = 0.1


async def contend(name: str, duration_s: float) -> None:
    lease = RayLease(joined("a test"), name, str(os.getpid()), time.monotonic, duration_s)
    while True:
        is_ours = await lease.held()
        sys.stdout.write(f"{'held' if is_ours else 'not'} {time.monotonic()}\n")
        sys.stdout.flush()
        await asyncio.sleep(LOOK_S)


if __name__ == "__main__":
    asyncio.run(contend(sys.argv[1], float(sys.argv[2])))
