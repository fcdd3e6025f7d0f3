"""What no policy can beat on a trace: `python -m bench.policy.bound --trace FILE`.

All caches of the fleet are one, the least recently used block goes, and nobody ever waits: what is
left is the time to compute what is not cached. A policy that routes has less cache in reach of each
request, and other requests in its way.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from select_service.simulator.runs import Engine, RunSettings, Trace, workload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from select_service.simulator.core.requests import Request


class Bound(NamedTuple):
    """The least there can be; seconds."""

    hit_rate: float
    ttft_mean_s: float
    ttft_p90_s: float


def bound(requests: Iterable[Request], engine: Engine, block_size: int, workers: int) -> Bound:
    """Return it for so many engines, one request after the other."""
    built = engine.build()
    latency, step_tokens_max = built.latency, built.step_tokens_max
    room = workers * (engine.kv_tokens // block_size)
    kept: OrderedDict[int, None] = OrderedDict()
    times: list[float] = []
    found = asked = 0
    for request in requests:
        blocks = request.blocks[: request.isl // block_size]
        hits = 0
        for block in blocks[: (request.isl - 1) // block_size]:
            if block not in kept:
                break
            hits += 1
        for block in reversed(blocks):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > room:
            kept.popitem(last=False)
        found, asked = found + hits * block_size, asked + request.isl
        done, seconds = hits * block_size, 0.0
        while done < request.isl:
            tokens = min(step_tokens_max, request.isl - done)
            seconds += latency.prefill_s(tokens, done) + latency.stretch_s(0, 0, 1)
            done += tokens
        times.append(seconds)
    return Bound(found / asked, float(np.mean(times)), float(np.percentile(times, 90)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", required=True, help="in Mooncake's format")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--workers", type=int, nargs="+", default=(8, 16, 64))
    args = parser.parse_args()
    settings = RunSettings(trace=Trace(path=args.trace, limit=args.limit))
    source = workload(settings)
    requests = list(iter(source.next, None))
    for workers in args.workers:
        least = bound(requests, settings.engine, settings.block_size, workers)
        print(
            f"{workers} workers: hit rate {least.hit_rate:.3f}, "
            f"TTFT mean {least.ttft_mean_s * 1e3:.0f} ms, p90 {least.ttft_p90_s * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
