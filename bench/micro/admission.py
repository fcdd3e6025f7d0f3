"""What one decision of the gate costs: `python -m bench.micro.admission`.

Prints µs of CPU per judged and settled request with every check on (busy thresholds, N + Q caps,
tenant budgets, the policy, cache hits apart), 256 workers of one rank, for each policy; then what
their books cost. The load changes before every decision, as a booking
would: nothing is measured from a warm answer.
"""

from __future__ import annotations

import argparse
import random
from time import process_time
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from select_service.core.admission.busy import BusyRanks
from select_service.core.admission.capacity import WorkerCaps
from select_service.core.admission.gate import Gate
from select_service.core.admission.hit_threshold import filter_rows
from select_service.core.admission.policies import Built, build
from select_service.core.admission.policy_api import AdmissionRequest
from select_service.core.admission.thresholds import Thresholds
from select_service.simulator.recorded_loads import RankLoad, RecordedPool

if TYPE_CHECKING:
    from collections.abc import Callable


ROUNDS = 20_000
REPEATS = 5
BUDGETS: dict[str, Any] = {"tenant_budgets": {f"tenant-{n}": 0.9 for n in range(8)}}
POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("always-admit", {}),
    ("token-bucket", {"capacity": 1e12, "refill_rate": 1e9}),
    ("token-bucket", {"capacity": 1e12, "refill_rate": 1e9, "per_tenant": True}),
    ("tier-shed", {"threshold": 1_000}),
    ("gaie-legacy", {}),
    ("slo-shed", {}),
    ("slo-shed", {"budget_tokens": 1e12}),
)
REFUSING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gaie-legacy", {"kv_utilization": 1e-6}),
    ("slo-shed", {"targets_ms": {"batch": 0.001}}),
    ("token-bucket", {"capacity": 1, "refill_rate": 0.001}),
)

_random = random.Random(1)


def gate_of(policy: str, config: dict[str, Any], workers: int) -> Gate[None]:
    """Every book on, a little load everywhere, the first workers busy and full."""
    built: Built[None] = build(policy, config | BUDGETS)
    pool, busy, caps = RecordedPool(), BusyRanks(), WorkerCaps()
    busy.set_thresholds(Thresholds(0.9, 50_000, 10.0))
    for slot in range(workers):
        pool.seat(slot, 8192)
        busy.seat(slot, 8192, 8192)
        caps.seat(slot, [slot], 64, 16)
        tokens = 90_000 if slot < 2 else _random.randrange(2_000)
        requests = 64 if slot < 2 else 4
        pool.note(slot, RankLoad(tokens, 1000, requests, 1), 0.0)
        busy.note(slot, tokens, 1000)
        caps.note(slot, requests)
    return Gate(built.classes, built.policy, pool, queue=built.queue, busy=busy, caps=caps)


def best(action: Callable[[int], object]) -> float:
    """Best µs of CPU of one call, of some rounds; no number comes twice."""
    times = []
    for repeat in range(REPEATS):
        start = process_time()
        for number in range(repeat * ROUNDS, (repeat + 1) * ROUNDS):
            action(number)
        times.append((process_time() - start) / ROUNDS * 1e6)
    return min(times)


def asks() -> list[AdmissionRequest]:
    """Requests of all classes and several tenants, each with a key of its own."""
    names = ("critical", "standard", "batch", "sheddable", "background")
    return [
        AdmissionRequest(
            512, names[n % 5], f"tenant-{n % 100}", output_tokens=128, key=n.to_bytes(8, "big")
        )
        for n in range(ROUNDS * REPEATS)
    ]


def deciding(
    gate: Gate[None], some: list[AdmissionRequest], rows: slice[int, int, None]
) -> Callable[[int], None]:
    """One request after another, a millisecond apart."""

    def decide(number: int) -> None:
        ask, now = some[number], number * 1e-3
        gate.settle(gate.judge(ask, rows, now), ask, now)

    return decide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=256)
    workers = parser.parse_args().workers
    some, rows = asks(), slice(0, workers)
    loop = best(lambda _: None)
    print(f"judge + settle, {workers} workers, thresholds, caps and tenant budgets on")
    for policy, config in POLICIES:
        gate = gate_of(policy, config, workers)

        keys = [key for key in config if key in {"per_tenant", "budget_tokens"}]
        cost = best(deciding(gate, some, rows)) - loop
        refused = gate.tallies.total().refused
        print(f"  {' '.join([policy, *keys]):40} {cost:5.2f} µs   ({refused} refused)")
    for policy, config in REFUSING:
        gate = gate_of(policy, config, workers)
        cost = best(deciding(gate, [replace(ask, slo_class="batch") for ask in some], rows)) - loop
        assert not gate.tallies.total().admitted
        print(f"  {policy + ', refusing with a promise':40} {cost:5.2f} µs")
    gate = gate_of("slo-shed", {}, workers)
    print("the books")
    pool, busy, caps = gate.pool, gate.busy, gate.caps
    assert busy is not None
    assert caps is not None
    changes: tuple[tuple[str, Callable[[int], object]], ...] = (
        ("saturation of all ranks", lambda _: pool.saturation),
        ("busy bit", lambda n: busy.note(2 + n % (workers - 2), n % 3_000, 1000)),
        ("cap", lambda n: caps.note(2 + n % (workers - 2), 4)),
        ("skip busy and full", lambda _: caps.open_rows(busy.free_rows(rows))),
    )
    for name, action in changes:
        print(f"  {name:40} {best(action) - loop:5.2f} µs")
    blocks = np.array([float(_random.randrange(32)) for _ in range(workers)])
    cost = best(lambda _: filter_rows(blocks, 16, 512, 0.5)) - loop
    print(f"  {'filter by cache hits':40} {cost:5.2f} µs")


if __name__ == "__main__":
    main()
