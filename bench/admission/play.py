"""One run as a play in model time: clients arrive, ask, return when they may, and are computed.

It knows neither HTTP nor a gate: it hands out what is to be sent, and gets the answers. So the
live service (`live.py`) and the policies alone (`simulated.py`) are given the very same play.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from bench.admission.worker import Happening, SimulatedWorker, WorkerSettings
from bench.admission.workload import Client, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Play", "Script", "Sends"]

_RETRY_JITTER_S = 0.2


@dataclass(frozen=True, slots=True)
class Script:
    """What is played; times in model seconds.

    Arrivals go on at the same rate before and after those that are measured: one that is refused
    must come back to a pool that is as busy as the one that refused.
    """

    workload: Workload
    rate: float  # arrivals per second
    seconds: float  # of measured arrivals
    warm_up_s: float = 5.0
    tail_s: float | None = None
    """So long after the last measured arrival one without a first token has missed its target;
    None: the longest one of the workload."""
    seed: int = 1
    retries: int = 1
    tells_answers: bool = True  # whether requests say how long their answers will be
    workers: int = 4
    settings: WorkerSettings = field(default_factory=WorkerSettings)

    @property
    def measured_from(self) -> float:
        """First arrival that counts."""
        return self.warm_up_s

    @property
    def measured_until(self) -> float:
        """End of the arrivals that count."""
        return self.warm_up_s + self.seconds

    @property
    def ends_at(self) -> float:
        """The run is over then at the latest."""
        tail_s = self.tail_s
        if tail_s is None:
            tail_s = max(self.workload.targets_s.values())
        return self.measured_until + tail_s


class Sends(NamedTuple):
    """What is to be sent now."""

    attempts: list[Client]
    tellings: list[Happening]


class Play:
    """The state of one run."""

    def __init__(self, script: Script, *, reports_blocks: bool = True) -> None:
        self.script = script
        self.workers = {
            number: SimulatedWorker(number, script.settings, reports_blocks=reports_blocks)
            for number in range(1, script.workers + 1)
        }
        self.clients: list[Client] = []
        self._rng = Random(f"returns-{script.seed}")
        self._arrivals = script.workload.clients(script.rate, script.seed)
        self._next = next(self._arrivals)
        self._returns: list[tuple[float, int, Client]] = []
        self._unresolved = 0  # measured, and may still change
        self.latest_s = 0.0
        """By how much the player was late, at worst."""

    # -- time passes ---------------------------------------------------------------------------

    def next_event(self) -> float:
        """When something happens by itself."""
        returns = self._returns[0][0] if self._returns else math.inf
        steps = min(worker.next_event for worker in self.workers.values())
        return min(self._next.arrives_at, returns, steps)

    def is_over(self, now: float) -> bool:
        """Whether all that is measured is decided, or time is up."""
        if now >= self.script.ends_at:
            return True
        return not self._unresolved and now >= self.script.measured_until

    def advance(self, now: float) -> Sends:
        """Let everything happen that is due, in order of time."""
        sends = Sends([], [])
        while (at := self.next_event()) <= now:
            self.latest_s = max(self.latest_s, now - at)
            if at == self._next.arrives_at:
                self._arrive(sends)
            elif self._returns and at == self._returns[0][0]:
                self._return(heapq.heappop(self._returns)[2], at, sends)
            else:
                self._step(at, sends)
        return sends

    def _arrive(self, sends: Sends) -> None:
        client = self._next
        self._next = next(self._arrivals)
        script = self.script
        client.is_measured = script.measured_from <= client.arrives_at < script.measured_until
        self._unresolved += client.is_measured
        self.clients.append(client)
        client.tries = 1
        sends.attempts.append(client)

    def _return(self, client: Client, at: float, sends: Sends) -> None:
        client.returned_at = at
        client.returns_at = None
        client.tries += 1
        sends.attempts.append(client)

    def _step(self, at: float, sends: Sends) -> None:
        worker = min(self.workers.values(), key=lambda one: one.next_event)
        for happening in worker.step():
            client = happening.client
            if happening.kind == "first_token":
                client.first_token_at = at
            elif happening.kind == "done":
                self._resolve(client)
            sends.tellings.append(happening)

    # -- answers -------------------------------------------------------------------------------

    def admitted(self, client: Client, worker_id: int, now: float) -> None:
        """The client may go to a worker, and does at once."""
        client.admitted_at = now
        client.worker_id = worker_id
        self.workers[worker_id].submit(client, now)

    def refused(self, client: Client, reason: str, retry_after_s: float | None, now: float) -> None:
        """The client was refused; it returns at the time it was given, if it was and may."""
        client.refusals.append(reason)
        if retry_after_s is None or client.tries > self.script.retries:
            self._resolve(client)
            return
        at = now + retry_after_s + self._rng.uniform(0.0, _RETRY_JITTER_S)
        client.returns_at = at
        if at >= self.script.ends_at:  # its target will have passed
            self._resolve(client)
            return
        heapq.heappush(self._returns, (at, client.number, client))

    def failed(self, client: Client, why: str) -> None:
        """The client got no answer, or one that means nothing."""
        client.failure = why
        self._resolve(client)

    def _resolve(self, client: Client) -> None:
        self._unresolved -= client.is_measured

    def measured(self) -> Sequence[Client]:
        """Those that count."""
        return [client for client in self.clients if client.is_measured]
