"""The play before the policies alone: the gate and its books under a fake clock, no HTTP.

Finds the capacity that loads are given in, and says whether the live service does what its policies
do without it. Requests go to the worker with the fewest prompt tokens to compute, then blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.admission.measures import Result, measure
from bench.admission.play import Play, Script
from select_service.core.admission.gate import AdmissionDecision, Gate
from select_service.core.admission.policies import Built, build
from select_service.core.admission.policy_api import AdmissionRequest
from select_service.core.ledger.charge import Charge
from select_service.errors import retry_after_header
from select_service.simulator.trial_pool import RecordedPool, RecordedRankLoad

if TYPE_CHECKING:
    from bench.admission.contender import Contender
    from bench.admission.worker import Happening
    from bench.admission.workload import Client

__all__ = ["Simulated", "simulate"]

_EXPIRED_PER_TURN = 64


@dataclass(slots=True)
class _Rank:
    prefill_tokens: int = 0
    blocks: int = 0
    requests: int = 0
    prefilling: int = 0


class Simulated:
    """One play with a gate of its own."""

    def __init__(
        self, script: Script, policy: str, config: dict[str, Any], *, time_scale: float = 1.0
    ) -> None:
        self.play = Play(script, reports_blocks=False)
        self._scale = time_scale  # wall seconds per second: the header has whole ones
        self.refused_at: list[tuple[float, str]] = []
        built: Built[Client] = build(policy, config)
        self.pool = RecordedPool()
        self.gate: Gate[Client] = Gate(built.classes, built.policy, self.pool, queue=built.queue)
        self._slots = {worker_id: slot for slot, worker_id in enumerate(self.play.workers)}
        self._ranks = [_Rank() for _ in self._slots]
        self._filled = [0] * len(self._slots)
        self._queued: dict[int, int] = {}  # by client, tokens ahead of it on its rank
        self._charges: dict[int, Charge] = {}  # by client
        for slot in range(len(self._ranks)):
            self.pool.attach(slot, script.settings.kv_blocks, script.settings.sequences_max)

    def run(self) -> Result:
        """Play it to its end."""
        play, gate = self.play, self.gate
        now = 0.0
        while not play.is_over(now):
            expiry = math.inf if gate.queue is None else gate.queue.next_expiry()
            now = min(play.next_event(), expiry)
            sends = play.advance(now)
            changed = {self._note(happening, now) for happening in sends.tellings}
            for slot in changed | self._take_blocks():
                self._report(slot, now)
            for client in sends.attempts:
                self._attempt(client, now)
            for late, decision in gate.expired(now, _EXPIRED_PER_TURN):
                self._refuse(late.item, decision, now)
            while (one := gate.next_waiting()) is not None:
                gate.serve(one, now)
                self._charge(one.item, one.ask, one.band)
                self._place(one.item, now)
        gate.check()
        return measure(play, self.refused_at)

    def _take_blocks(self) -> set[int]:
        """Count the blocks that answers have filled; return the slots where."""
        changed = set()
        for worker_id, slot in self._slots.items():
            filled = self.play.workers[worker_id].output_blocks - self._filled[slot]
            if filled:
                self._filled[slot] += filled
                self._ranks[slot].blocks += filled
                changed.add(slot)
        return changed

    def _attempt(self, client: Client, now: float) -> None:
        ask = AdmissionRequest(
            client.tokens,
            client.slo_class,
            client.tenant_id,
            output_tokens=client.output_tokens if self.play.script.tells_answers else 0,
            target_s=client.target_s,
            key=client.number.to_bytes(8, "big"),
        )
        decision = self.gate.judge(ask, slice(0, len(self._ranks)), now)
        self.gate.settle(decision, ask, now)
        if decision.outcome == "wait":
            self.gate.enqueue(ask, client, now)
        elif decision.admitted:
            if self.gate.queue is not None:
                self._charge(client, ask, self.gate.queue.judged_line)
            self._place(client, now)
        else:
            self._refuse(client, decision, now)

    def _charge(self, client: Client, ask: AdmissionRequest, line: int) -> None:
        assert self.gate.queue is not None
        size = self.play.script.settings.block_size
        self._charges[client.number] = Charge(
            self.gate.queue, line, ask.tenant_id, ask.output_tokens, size
        )

    def _refuse(self, client: Client, decision: AdmissionDecision, now: float) -> None:
        self.refused_at.append((now, client.slo_class))
        header = None  # it never fits: it is given no time
        if decision.retry_after_s != math.inf:
            header = retry_after_header(decision.retry_after_s * self._scale) / self._scale
        self.play.refused(client, decision.code, header, now)

    def _place(self, client: Client, now: float) -> None:
        worker_id, slot = min(
            self._slots.items(),
            key=lambda one: (self._ranks[one[1]].prefill_tokens, self._ranks[one[1]].blocks),
        )
        rank = self._ranks[slot]
        self._queued[client.number] = rank.prefill_tokens
        rank.prefill_tokens += client.tokens
        rank.blocks += client.tokens // self.play.script.settings.block_size
        rank.requests += 1
        rank.prefilling += 1
        self.pool.began(client.tenant_id)
        self.play.admitted(client, worker_id, now)
        self._report(slot, now)

    def _note(self, happening: Happening, now: float) -> int:
        """Count what happened; return the slot whose load has changed."""
        client, kind = happening
        slot = self._slots[client.worker_id]
        rank = self._ranks[slot]
        size = self.play.script.settings.block_size
        if kind == "first_token":
            rank.prefill_tokens -= client.tokens
            rank.prefilling -= 1
            assert client.admitted_at is not None
            queued = self._queued.pop(client.number)
            self.pool.prefilled(slot, client.tokens, client.admitted_at, now, queued)
        else:
            if (charge := self._charges.pop(client.number, None)) is not None:
                charge.ended((client.output_tokens - 1) // size)
            rank.requests -= 1
            rank.blocks -= client.tokens // size + (client.output_tokens - 1) // size
            self.pool.ended(client.tenant_id, client.admitted_at)
        return slot

    def _report(self, slot: int, now: float) -> None:
        rank = self._ranks[slot]
        worker = self.play.workers[slot + 1]
        load = RecordedRankLoad(
            rank.prefill_tokens,
            rank.blocks,
            rank.requests,
            rank.prefilling,
            len(worker.waiting),
            worker.running,
        )
        self.pool.note(slot, load, now)


def simulate(script: Script, contender: Contender, *, time_scale: float = 1.0) -> Result:
    """Play a script before one policy."""
    config = contender.in_model_time(time_scale)
    return Simulated(script, contender.policy, config, time_scale=time_scale).run()
