"""The gate of one partition: what it says of requests, and those that wait at it.

The rest of `core/admission` decides and knows neither ledger nor tickets; `rank_limits.py` follows
the ledger, and this module the tickets. A partition has one only if there is something to judge: a
policy, thresholds or caps.
Process-wide state (settings, thresholds by name, which partitions have a gate) is in
`controller.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from select_service.core.admission.gate import AT_CAPACITY, OUTRANKED, Gate
from select_service.core.admission.policy_api import ADMIT, AdmissionRequest
from select_service.core.admission.rank_limits import RankLimits
from select_service.core.admission.refusal_facts import (
    busy_facts,
    cap_facts,
    policy_facts,
    recognisable,
)
from select_service.core.admission.retry_after import RetryPromises
from select_service.core.admission.tallies import WaitTimes
from select_service.core.admission.tenant_budgets import TenantBudgets
from select_service.core.admission.totals import Totals
from select_service.core.ledger.charge import Charge

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from select_service.core.admission.gate import AdmissionDecision, GateName
    from select_service.core.admission.policies import Built
    from select_service.core.admission.policy_api import AdmissionVerdict
    from select_service.core.admission.queue import Ticket
    from select_service.core.admission.thresholds import Thresholds
    from select_service.core.columns import Rows
    from select_service.core.ledger.drain_meter import DrainMeter
    from select_service.core.ledger.ledger import Ledger
    from select_service.core.ledger.reservation import LedgerReservation
    from select_service.types.admission import AdmissionSettings, ChargedRequest

SCANNED_MAX: Final = 256
"""Waiting requests examined each time load drops: usually a third of a µs each. A request beyond,
waiting for a worker of its own, may stand behind others for a while."""

WAITS_FOR_PREFILL: Final = "waits-for-prefill"
"""The code of a request that waits in the policy file's queues."""


class PartitionAdmission(RankLimits):
    """Runs the gate, and keeps the requests that must wait at it."""

    def __init__(
        self,
        ledger: Ledger,
        built: Built[Ticket],
        settings: AdmissionSettings,
        thresholds: Thresholds,
        returns: RetryPromises | None,
        meter: DrainMeter,
        *,
        totals: Totals | None = None,
        tenant_id: str | None = None,
    ) -> None:
        """Follow a ledger from now on; `attach` brings the workers.

        `returns` are promises shared with other gates, if the policy's allowance is shared;
        then `tenant_id` says whose it gives. Without `totals`, shared by all gates, this is
        the only one.
        """
        self._totals = totals or Totals(settings.tenant_labels_max)
        super().__init__(ledger, settings, thresholds, meter)
        self.gate: Gate[Ticket] = Gate(
            built.classes,
            built.policy,
            self.pool,
            queue=built.queue,
            busy=self.busy,
            caps=self.caps,
            returns=returns or self._own_returns(built),
            by_tenant=self._totals.by_tenant,
            tenant_id=tenant_id,
        )
        self._shares_returns = returns is not None
        self.waiting: dict[Ticket, None] = {}
        """Requests waiting at the gate, oldest first; the policy file's wait in its queues."""
        self.displaced: dict[Ticket, None] = {}
        """Requests that waited under another policy and must be judged again."""
        self.waiting_isl_tokens = 0
        self.rejections: dict[str, int] = {}
        """Refusals for load by endpoint."""
        self.wait_times: dict[str, WaitTimes] = {}
        self._learn_wants()

    def _learn_wants(self) -> None:
        """Track requests in flight by tenant if the current policy needs it."""
        changes = self.changes
        wanted = isinstance(self.gate.policy, TenantBudgets)
        if wanted and not changes.names_wanted:
            reservations = self._ledger.all_reservations()
            self.pool.recount(Counter(one.fairness_id for one in reservations))
        changes.begun.clear()
        changes.ended.clear()
        changes.names_wanted = wanted
        changes.look = True

    def _own_returns(self, built: Built[Ticket]) -> RetryPromises:
        return RetryPromises(
            len(built.classes.bands),
            slots_max=self._settings.return_slots_max,
            horizon_s=self._settings.return_horizon_s,
            counts=self._totals.promises,
        )

    # -- workers -------------------------------------------------------------------------------

    def detach(self, worker_id: int) -> list[Ticket]:
        """Remove a worker; return the tickets that held a place with it and need another."""
        if not self._drop(worker_id):
            return []
        both = (*self.waiting, *self.displaced)
        homeless = [ticket for ticket in both if ticket.place == worker_id]
        for ticket in homeless:
            ticket.place = None
        return homeless

    # -- judging -------------------------------------------------------------------------------

    def judge(
        self,
        ticket: Ticket,
        ask: AdmissionRequest,
        rows: Rows,
        now: float,
        verdict: AdmissionVerdict | None = None,
    ) -> tuple[AdmissionRequest, AdmissionDecision]:
        """Judge whether a request may be placed on one of these rows now; charges nothing.

        The request's key is computed only if it may matter.

        `verdict` is the policy's, if it was already asked and no other gate applies.
        """
        gate = self.gate
        if gate.returns.size:
            ask = recognisable(ask, ticket)
        name: GateName = "policy"
        if verdict is None:
            if self.pool.instances and not (self.busy.slots or self.caps.slots):
                verdict = gate.policy.judge(ask, self.pool, now)
            else:
                name, verdict = gate.first_word(ask, rows, now)
        decision = gate.admitted
        if verdict is not ADMIT:
            ask = recognisable(ask, ticket)
            decision = gate.decide(ask, name, verdict, rows, now)
        ticket.asked, ticket.gate_decision = ask, decision
        return ask, decision

    def settle(
        self, decision: AdmissionDecision, ask: AdmissionRequest, now: float, endpoint: str = ""
    ) -> None:
        """Charge and count a decision."""
        self.gate.settle(decision, ask, now)
        if decision.outcome == "refuse" and decision.gate != "cache_hit":
            self.rejections[endpoint] = self.rejections.get(endpoint, 0) + 1

    def refuse(
        self, ask: AdmissionRequest, gate: GateName, reason: str, code: str, now: float
    ) -> AdmissionDecision:
        """Settle a refusal decided elsewhere."""
        decision = self.gate.refusal(ask, gate, reason, code, now)
        self.gate.settle(decision, ask, now)
        return decision

    def is_reported(self, rows: Rows) -> bool:
        """Tell whether any of these ranks is judged by what its worker reports."""
        return self.gate.busy is not None and self.gate.busy.is_reported(rows)

    def full(self, now: float) -> AdmissionDecision:
        """Refuse an explicit booking on a full worker.

        It was not offered, so no class counts it.
        """
        return self.gate.refusal(
            AdmissionRequest(0), "capacity", AT_CAPACITY.reason, AT_CAPACITY.code, now
        )

    def never_fit_together(
        self, asks: Sequence[AdmissionRequest], alike: int, rows: Rows
    ) -> str | None:
        """Return the code of the limit these requests exceed if all are held at once, or None.

        O(requests + workers); for a batch of all or none that was refused.

        `alike` is how many of them may only be placed on `rows`, the candidates of the
        refused one.
        """
        everyone = self.caps.inflight_most(slice(0, len(self.caps.full)))
        if len(asks) > everyone or alike > self.caps.inflight_most(rows):
            return AT_CAPACITY.code
        totals: dict[str, AdmissionRequest] = {}
        for ask in asks:
            line, _ = self.gate.policy.refill(ask, self.pool)
            tokens = ask.tokens + (totals[line].tokens if line in totals else 0)
            totals[line] = replace(ask, tokens=tokens)
        for total in totals.values():
            verdict = self.gate.policy.judge(total, self.pool, self.now)
            if not verdict.can_fit:
                return verdict.code
        return None

    # -- waiting -------------------------------------------------------------------------------

    @property
    def waiting_count(self) -> int:
        """The number of tickets waiting at the gate."""
        return len(self.waiting) + len(self.displaced)

    def wait(self, ticket: Ticket, ask: AdmissionRequest, rows: Rows, now: float) -> None:
        """Let a ticket wait, after its decision was settled."""
        self.keep_for(ticket, ask, now)
        if self.gate.queue is not None:
            ticket.waiting = self.gate.enqueue(ask, ticket, now)
        if self.caps.all_full(rows):  # counts against Q whatever else it waits for
            ticket.place = self.caps.take_place(rows)
        self.waiting[ticket] = None
        self.waiting_isl_tokens += ticket.prompt.isl_tokens

    def keep_for(self, ticket: Ticket, ask: AdmissionRequest, now: float) -> None:
        """Hold the policy's allowance for a ticket that it admitted but that must still wait."""
        ticket.ask = ask
        if self.gate.policy.charges:
            ticket.held = self.gate.policy.hold(ask, now)

    def in_order(self) -> Iterator[Ticket]:
        """Yield the tickets waiting at the gate that the policy would let go."""
        if self.gate.queue is None:
            return islice(iter(self.waiting), SCANNED_MAX)
        return (one.item for one in self.gate.may_go(SCANNED_MAX))

    def placed(self, ticket: Ticket, now: float) -> None:
        """Charge and count a ticket that waited and is now placed."""
        ask, one = ticket.ask, ticket.waiting
        assert ask is not None
        self._time(ticket, now)
        self._forget(ticket)
        if one is not None and one.flow is not None:
            self.gate.serve(one, now)
        else:
            self.gate.placed(ask, now)

    def charge_of(self, ticket: Ticket) -> Charge | None:
        """Return what the end of a request that is being placed will correct, if anything."""
        queue, ask = self.gate.queue, ticket.ask or ticket.asked
        if queue is None or ask is None:
            return None
        line = queue.judged_line if ticket.waiting is None else ticket.waiting.band
        size = ticket.partition.index.block_size
        return Charge(queue, line, ask.tenant_id, ask.output_tokens, size)

    def charge_of_replica(
        self, reservation: LedgerReservation, charged: ChargedRequest, block_size: int, now: float
    ) -> Charge | None:
        """Charge a tenant for what another replica has just admitted; all serve the same pool.

        Returns what the end of the request will correct.
        """
        queue, expected = self.gate.queue, reservation.expected_output_tokens or 0
        if queue is None:
            return None
        tenant = reservation.fairness_id
        ask = AdmissionRequest(
            charged.prefill_tokens,
            charged.slo_class,
            tenant,
            output_tokens=expected,
            target_s=math.inf if charged.target_s is None else charged.target_s,
        )
        line = queue.charge_of_replica(ask, now)
        return Charge(queue, line, tenant, expected, block_size)

    def turned_away(self, ticket: Ticket, code: str, now: float) -> None:
        """Refuse a ticket that waited; not charged."""
        assert ticket.ask is not None
        self._time(ticket, now)
        self._take_out(ticket, now)
        self.gate.turn_away(ticket.ask, code)

    def outranked(self, ask: AdmissionRequest, rows: Rows, now: float) -> Ticket | None:
        """Return the ticket that must give up its place with one of these full workers."""
        queue = self.gate.queue
        if queue is None or self.gate.policy.judge(ask, self.pool, now).outcome == "refuse":
            return None  # none gives way to a request that is refused anyway
        for one in islice(queue.outranked(ask, now), SCANNED_MAX):
            slots = self._slots.get(one.item.place, {}) if one.item.place is not None else {}
            if any(_has(rows, slot) for slot in slots.values()):
                return one.item
        return None

    def give_way(self, ticket: Ticket, now: float) -> AdmissionDecision:
        """Refuse a ticket that waited, for a more important one; not charged."""
        assert ticket.ask is not None
        reason, code = OUTRANKED.reason, OUTRANKED.code
        decision = self.gate.refusal(ticket.ask, "waiting", reason, code, now)
        self.turned_away(ticket, code, now)
        return decision

    def refuse_late(self, ticket: Ticket, now: float) -> AdmissionDecision:
        """Refuse a ticket that has waited too long; not charged."""
        assert ticket.ask is not None
        self._time(ticket, now)
        self._take_out(ticket, now)
        return self.gate.refuse_waiting(ticket.ask, now)

    def withdraw(self, ticket: Ticket) -> None:
        """Remove a waiting ticket whose client left; not charged."""
        assert ticket.ask is not None
        self._time(ticket, self.now)
        self._take_out(ticket, self.now)
        self.gate.gone(ticket.ask)

    def leave_queue(self, ticket: Ticket, now: float) -> None:
        """Take a ticket out of the policy's queue, whatever its outcome. Idempotent."""
        queue, one = self.gate.queue, ticket.waiting
        if queue is not None and one is not None:
            queue.withdraw(one, now)

    def _take_out(self, ticket: Ticket, now: float) -> None:
        self.leave_queue(ticket, now)
        self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        ticket.waiting = None
        if ticket.held is not None:
            ticket.held.release()
            ticket.held = None
        if ticket.place is not None:
            self.caps.leave_place(ticket.place)
            ticket.place = None
        if ticket in self.waiting:
            del self.waiting[ticket]
        elif ticket in self.displaced:
            del self.displaced[ticket]
        else:
            return  # it waited in the policy file's queues
        self.waiting_isl_tokens -= ticket.prompt.isl_tokens

    def displace(self, ticket: Ticket) -> None:
        """Mark a ticket from the policy file's queues to be judged again."""
        self.displaced[ticket] = None
        self.waiting_isl_tokens += ticket.prompt.isl_tokens

    def recall(self, ticket: Ticket) -> None:
        """Take a ticket out to be judged again; it still counts as waiting."""
        self._forget(ticket)

    def change(self, built: Built[Ticket], returns: RetryPromises | None, now: float) -> None:
        """Put another policy in force at once; tickets waiting here are to be judged again."""
        self._totals.left_by_queue(self.gate.queue)
        self.gate.change(built, now)
        self.refresh(now)
        self._learn_wants()
        if returns is not None:
            if returns is not self.gate.returns:
                self.gate.returns.give_up()
            self.gate.returns = returns
        elif self._shares_returns:  # other gates' promises do not bind this pool
            self.gate.returns.give_up()
            self.gate.returns = self._own_returns(built)
        self._shares_returns = returns is not None
        for ticket in self.waiting:
            ticket.waiting = None  # it keeps its place with a worker: newcomers must not take it
        self.displaced |= self.waiting
        self.waiting.clear()

    def close(self) -> None:
        """Give up the promises of a removed scope: requests cannot return to it."""
        if not self._shares_returns:
            self.gate.returns.give_up()

    def _time(self, ticket: Ticket, now: float) -> None:
        assert ticket.ask is not None
        name = self.gate.tallies.name_of(ticket.ask.slo_class)
        times = self.wait_times.get(name)
        if times is None:
            times = self.wait_times[name] = WaitTimes()
        times.add(max(0.0, now - ticket.since))

    def exceeded(self, decision: AdmissionDecision, rows: Rows) -> dict[str, object]:
        """Return knob, value and limit behind a refusal, if there are any."""
        first = _first(rows)
        if first not in self._by_slot:
            return policy_facts(decision)
        if decision.gate == "busy":
            return busy_facts(self.busy.exceeded(first))
        if decision.gate == "capacity":
            return cap_facts(self.caps[self._by_slot[first][0]])
        return policy_facts(decision)

    def check(self) -> None:
        """Assert that the books match the ledger, and each waiting ticket is accounted for."""
        self.refresh(self.now)
        self.gate.check()
        both = (*self.waiting, *self.displaced)
        assert self.waiting_isl_tokens == sum(ticket.prompt.isl_tokens for ticket in both)
        assert not self.waiting.keys() & self.displaced.keys()
        held = Counter(ticket.place for ticket in both if ticket.place is not None)
        for worker_id in self._slots:
            assert self.caps[worker_id].queued == held[worker_id]
        self.check_limits()


def _first(rows: Rows) -> int:
    if isinstance(rows, slice):
        return 0 if rows.stop else -1
    return int(rows[0]) if len(rows) else -1


def _has(rows: Rows, slot: int) -> bool:
    return slot < rows.stop if isinstance(rows, slice) else bool((rows == slot).any())
