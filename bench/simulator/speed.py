"""How fast a simulation is: `python -m bench.simulator.speed [--trace FILE]`.

Simulated requests per minute of processor time on one core, all work included (requests are drawn
or a trace is read, everything is checked and measured), for blocks of each size and each number of
selector replicas; and a digest of the measures: whoever makes it faster must not change them.
Without a trace 5,000 chats, shared prompts, samples of RL groups and turns of agents each.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from itertools import product
from typing import Final

import msgspec
from msgspec.structs import replace

from select_service.simulator.core.workloads import WorkloadSettings
from select_service.simulator.runs import at_load, run
from select_service.simulator.settings import PEER, POLICIES, SimulationSettings, Trace

SYNTHETIC: Final = {
    "chat": WorkloadSettings(kind="chat", rate=6.0, requests=5_000),
    "shared-prompts": WorkloadSettings(kind="shared-prompts", rate=30.0, requests=5_000),
    "rl": WorkloadSettings(kind="rl", requests=5_000),
    "agents": WorkloadSettings(kind="agents", rate=4.0, requests=5_000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", help="in Mooncake's format")
    parser.add_argument("--jitter", type=float, default=3.0, help="the trace's clock ticks so far")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--load", type=float, default=0.8, help="share of capacity")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--policy", choices=POLICIES, default=PEER)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=(16, 512))
    parser.add_argument("--replicas", type=int, nargs="+", default=(1, 3))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    base = SimulationSettings(workers=args.workers, policy=args.policy)
    bases = {kind: replace(base, workloads=[one]) for kind, one in SYNTHETIC.items()}
    if args.trace is not None:
        trace = Trace(path=args.trace, jitter_s=args.jitter, limit=args.limit)
        # one rate for all: what blocks and replicas cost, not what they let through
        bases = {"trace": at_load(replace(base, trace=trace), args.load)}
    for name, block_size, replicas in product(bases, args.block_sizes, args.replicas):
        settings = replace(bases[name], block_size=block_size, replicas=replicas)
        rates = []
        whole = hashlib.sha256()
        for seed in range(1, args.seeds + 1):
            begin = time.process_time()
            measures = run(replace(settings, seed=seed))
            rates.append(60 * measures.requests / (time.process_time() - begin))
            whole.update(msgspec.json.encode(measures))
        spread = ", ".join(f"{rate:,.0f}" for rate in rates)
        print(
            f"{name}, blocks of {block_size}, {replicas} replicas: "
            f"{statistics.mean(rates):,.0f} requests per minute ({spread}); "
            f"measures {whole.hexdigest()[:16]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
