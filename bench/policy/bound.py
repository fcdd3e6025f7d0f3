"""What no policy can beat on a trace: `python -m bench.policy.bound --trace FILE`.

Row one: all caches of the fleet are one, the least recently used block goes, and nobody ever waits:
what is left is the time to compute what is not cached. A policy that routes has less cache in reach
of each request, and other requests in its way.

Row two adds that answers are decoded beside a prompt: each of its steps is longer by the sequences
in flight, `1 / workers` of them and of their context, as if everything were spread evenly at every
moment. How many are in flight follows from the same: each gets a token for a step that only decodes
while its engine has no prompt to compute, and one for each step of a prompt while it has. Why even
is least: whoever computes a prompt decodes its answer, so an engine that takes more prompts has
more to decode beside each of them. Where a step's time is convex in sequences and tokens (in the
analytic model it is linear) the mean over prompts cannot be less than that of the even spread. It
bounds the mean: a single prompt may find an engine with less to do than the others at that moment,
by a sequence or two, each a millisecond a step, so the p90 of row two is near the least, not below.
"""

from __future__ import annotations

import argparse
import math
from collections import OrderedDict
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from select_service.simulator.core.latency import AnalyticLatency
from select_service.simulator.runs import at_load, workload
from select_service.simulator.settings import EngineSpec, SimulationSettings, Trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from select_service.simulator.core.requests import ClientRequest


class Bound(NamedTuple):
    """The least there can be; seconds."""

    hit_rate: float
    ttft_mean_s: float
    ttft_p90_s: float
    beside_mean_s: float  # with answers decoded beside
    beside_p90_s: float
    in_flight: float  # sequences that decode, mean over arrivals


class Prompt(NamedTuple):
    """What is left to compute of a prompt."""

    arrival: float
    isl: int
    osl: int
    prefill_s: float  # of all its steps, beside what a step costs in itself
    steps: int


def bound(
    requests: Iterable[ClientRequest], engine: EngineSpec, block_size: int, workers: int
) -> Bound:
    """Return it for so many engines, one request after the other."""
    built = engine.build()
    latency, step_tokens_max = built.latency, built.step_tokens_max
    # a measured profile need not be convex, and then even is not least
    assert isinstance(latency, AnalyticLatency)
    room = workers * (engine.kv_tokens // block_size)
    kept: OrderedDict[int, None] = OrderedDict()
    prompts: list[Prompt] = []
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
        done, seconds, steps = hits * block_size, 0.0, 0
        while done < request.isl:
            tokens = min(step_tokens_max, request.isl - done)
            seconds += latency.prefill_s(tokens, done)
            done += tokens
            steps += 1
        prompts.append(Prompt(request.arrival, request.isl, request.osl, seconds, steps))
    alone = [one.prefill_s + one.steps * latency.stretch_s(0, 0, 1) for one in prompts]
    beside, in_flight = _beside(prompts, latency, workers)
    return Bound(
        found / asked,
        *(float(np.mean(alone)), float(np.percentile(alone, 90))),
        *(float(np.mean(beside)), float(np.percentile(beside, 90))),
        float(np.mean(in_flight)),
    )


def _beside(
    prompts: Sequence[Prompt], latency: AnalyticLatency, workers: int
) -> tuple[list[float], list[float]]:
    """Return each prompt's time with its share of what decodes then, and how much that was.

    All sequences get their tokens at one pace, so one count of tokens is the clock of all of them;
    the pace is as it was at the last of the events (a prompt comes, is computed, an answer ends).
    """
    times: list[float] = []
    in_flight: list[float] = []
    now = tokens = 0.0
    ends: list[float] = []  # of answers, on the clock of tokens
    born = 0.0  # context of all at token 0 of that clock
    context: list[tuple[float, float]] = []  # as `ends`, with what goes from `born`
    computing: list[tuple[float, int, Prompt, float]] = []  # by the time they are computed
    steps_per_s = 0.0  # of those that are computed now
    for number, one in enumerate(prompts):
        while True:
            sequences = len(ends)
            alone_s = _step_s(latency, sequences, born + sequences * tokens, workers)
            busy = len(computing) / workers
            pace = steps_per_s / workers / max(1.0, busy) + max(0.0, 1.0 - busy) / alone_s
            ended = now + (ends[0] - tokens) / pace if ends else math.inf
            computed = computing[0][0] if computing else math.inf
            at = min(one.arrival, ended, computed)
            tokens += (at - now) * pace
            now = at
            if at == one.arrival:
                break
            if at == computed:
                _, _, first, seconds = heappop(computing)
                steps_per_s -= first.steps / seconds
                if first.osl > 1:
                    heappush(ends, tokens + first.osl - 1)
                    heappush(context, (tokens + first.osl - 1, first.isl - tokens))
                    born += first.isl - tokens
            else:
                heappop(ends)
                born -= heappop(context)[1]
        sequences = len(ends)
        in_flight.append(sequences)
        step_s = _step_s(latency, sequences, born + sequences * tokens, workers)
        seconds = one.prefill_s + one.steps * step_s
        times.append(seconds)
        heappush(computing, (now + seconds, number, one, seconds))
        steps_per_s += one.steps / seconds
    return times, in_flight


def _step_s(latency: AnalyticLatency, sequences: int, kv_tokens: float, workers: int) -> float:
    """Return what a step takes beside prompts, with an even share of all sequences."""
    share = sequences / workers * latency.sequence_s + kv_tokens / workers * latency.kv_token_s
    return latency.base_s + share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", required=True, help="in Mooncake's format")
    parser.add_argument("--jitter", type=float, default=3.0, help="the trace's clock ticks so far")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--load", type=float, default=0.8, help="share of capacity")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, nargs="+", default=(8, 16, 64))
    args = parser.parse_args()
    trace = Trace(path=args.trace, jitter_s=args.jitter, limit=args.limit)
    for workers in args.workers:
        settings = at_load(SimulationSettings(trace=trace, workers=workers), args.load)
        found = []
        for seed in range(1, args.seeds + 1):
            source = workload(replace(settings, seed=seed))
            requests = iter(source.next, None)
            found.append(bound(requests, settings.engine, settings.block_size, workers))
        least = Bound(*np.mean(found, axis=0).tolist())
        spread = np.std([one.beside_p90_s for one in found]) * 1e3
        print(
            f"{workers} workers: hit rate {least.hit_rate:.3f}, "
            f"TTFT mean {least.ttft_mean_s * 1e3:.0f} ms, p90 {least.ttft_p90_s * 1e3:.0f} ms; "
            f"beside {least.in_flight:.0f} answers, evenly spread: mean "
            f"{least.beside_mean_s * 1e3:.0f} ms, p90 {least.beside_p90_s * 1e3:.0f} ms "
            f"(deviation over seeds {spread:.1f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
