"""A gate before a pool that computes, and clients that do what Retry-After says."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from select_service.core.admission.gate import Gate
from select_service.core.admission.policies import Built, build
from select_service.core.admission.policy_api import AdmissionRequest
from select_service.errors import retry_after_header
from select_service.simulator.trial_pool import ComputingPool, TrialPoolSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

MIX = (  # class, tenant, share of arrivals, prompt, output
    ("critical", "alice", 0.25, 512, 128),
    ("standard", "bob", 0.25, 512, 128),
    ("batch", "carol", 0.35, 1024, 256),
    ("background", "carol", 0.15, 2048, 64),
)
MEAN_TOKENS = sum(share * tokens for _, _, share, tokens, _ in MIX)


@dataclass
class Client:
    ask: AdmissionRequest
    name: str
    born: float
    tries: int = 0
    admitted_at: float | None = None
    admitted_try: int = 0
    first_token_at: float = math.inf


@dataclass
class Fluid:
    """One run: `load` times what the pool computes arrives for `seconds`."""

    policy: str
    config: dict[str, Any] = field(default_factory=dict)
    load: float = 1.0
    seconds: float = 30.0
    seed: int = 1
    retries: int = 1
    settings: TrialPoolSettings = field(default_factory=TrialPoolSettings)
    latency_s: float = 0.02
    own_targets_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        built: Built[Client] = build(self.policy, self.config)
        self.pool = ComputingPool(self.settings)
        self.gate: Gate[Client] = Gate(built.classes, built.policy, self.pool, queue=built.queue)
        self.rng = random.Random(self.seed)
        self.clients: list[Client] = []
        self.events: list[tuple[float, int, Client]] = []
        self.order = 0
        self.refused: list[tuple[float, str, str, int]] = []  # when, class, code, try
        self.admitted: list[tuple[float, str]] = []

    def arrivals(self) -> Iterator[tuple[float, Client]]:
        capacity = self.settings.ranks * self.settings.prefill_tokens_per_s
        rate = self.load * capacity / MEAN_TOKENS
        now, number = 0.0, 0
        while (now := now + self.rng.expovariate(rate)) < self.seconds:
            kinds = self.rng.choices(MIX, [kind[2] for kind in MIX])
            name, tenant, _, tokens, output = kinds[0]
            number += 1
            key = number.to_bytes(8, "big")
            yield (
                now,
                Client(
                    AdmissionRequest(
                        tokens,
                        name,
                        tenant,
                        output_tokens=output,
                        target_s=self.own_targets_s.get(name, math.inf),
                        key=key,
                    ),
                    name,
                    now,
                ),
            )

    def schedule(self, when: float, client: Client) -> None:
        self.order += 1
        heappush(self.events, (when, self.order, client))

    def run(self) -> Fluid:
        for when, client in self.arrivals():
            self.clients.append(client)
            self.schedule(when, client)
        while True:
            arrival = self.events[0][0] if self.events else math.inf
            computed = self.pool.next_event()
            expiry = math.inf if self.gate.queue is None else self.gate.queue.next_expiry()
            now = min(arrival, math.inf if computed is None else computed, expiry)
            if now == math.inf:
                break
            if computed == now:
                self.pool.step()
            elif arrival == now:
                self.arrive(heappop(self.events)[2], now)
            for late, decision in self.gate.expired(now, 1000):
                self.on_refused(late.item, decision.code, decision.retry_after_s, now)
            while (one := self.gate.next_waiting()) is not None:
                self.gate.serve(one, now)
                self.place(one.item, now)
        self.gate.check()
        return self

    def arrive(self, client: Client, now: float) -> None:
        client.tries += 1
        decision = self.gate.judge(client.ask, slice(0, self.settings.ranks), now)
        self.gate.settle(decision, client.ask, now)
        if decision.outcome == "wait":
            self.gate.enqueue(client.ask, client, now)
        elif decision.admitted:
            self.place(client, now)
        else:
            self.on_refused(client, decision.code, decision.retry_after_s, now)

    def place(self, client: Client, now: float) -> None:
        client.admitted_at = now
        client.admitted_try = client.tries
        self.admitted.append((now, client.name))
        client.first_token_at = self.pool.place(client.ask, now)

    def on_refused(self, client: Client, code: str, retry_after_s: float, now: float) -> None:
        self.refused.append((now, client.name, code, client.tries))
        if client.tries <= self.retries:
            wait = retry_after_header(retry_after_s) + self.rng.uniform(0, self.latency_s)
            self.schedule(now + wait, client)

    # -- results -------------------------------------------------------------------------------

    def first_retries(self) -> tuple[int, int]:
        """How many came again once, and how many of them were let in then."""
        again = [client for client in self.clients if client.tries >= 2]
        return len(again), sum(client.admitted_try == 2 for client in again)

    def attained(self, targets: dict[str, float]) -> dict[str, float]:
        """Share of each class whose first token came in time, of all that were offered."""
        total, good = Counter[str](), Counter[str]()
        for client in self.clients:
            total[client.name] += 1
            good[client.name] += client.first_token_at - client.born <= targets[client.name]
        return {name: good[name] / total[name] for name in total}
