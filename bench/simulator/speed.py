"""How fast a simulation is: `python -m bench.simulator.speed --trace FILE`.

Simulated requests per minute of processor time on one core, all work included (the trace is read,
everything is checked and measured), for blocks of each size and each number of selector replicas;
and a digest of the measures: whoever makes it faster must not change them.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from itertools import product

import msgspec
from msgspec.structs import replace

from select_service.simulator.runs import PEER, POLICIES, RunSettings, Trace, at_load, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", required=True, help="in Mooncake's format")
    parser.add_argument("--jitter", type=float, default=3.0, help="the trace's clock ticks so far")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--load", type=float, default=0.8, help="share of capacity")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--policy", choices=POLICIES, default=PEER)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=(16, 512))
    parser.add_argument("--replicas", type=int, nargs="+", default=(1, 3))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    trace = Trace(path=args.trace, jitter_s=args.jitter, limit=args.limit)
    base = RunSettings(trace=trace, workers=args.workers, policy=args.policy)
    # one rate for all: what blocks and replicas cost, not what they let through
    base = at_load(base, args.load)
    for block_size, replicas in product(args.block_sizes, args.replicas):
        settings = replace(base, block_size=block_size, replicas=replicas)
        rates = []
        whole = hashlib.sha256()
        for seed in range(1, args.seeds + 1):
            begin = time.process_time()
            measures = run(replace(settings, seed=seed))
            rates.append(60 * measures.requests / (time.process_time() - begin))
            whole.update(msgspec.json.encode(measures))
        spread = ", ".join(f"{rate:,.0f}" for rate in rates)
        print(
            f"blocks of {block_size}, {replicas} replicas: {statistics.mean(rates):,.0f} requests "
            f"per minute ({spread}); measures {whole.hexdigest()[:16]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
