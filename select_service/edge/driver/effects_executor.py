"""Carries out what the core asks for, in the order of the fields of `Effects`.

Every verb, housekeeping, the replica plane and discovery end here. This file reaches listeners,
futures and sockets only through the objects that own them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from select_service.core.effects import NOTHING

if TYPE_CHECKING:
    from select_service.core.admission.queue import Ticket
    from select_service.core.effects import Effects, RankEjection, TrustChange
    from select_service.core.pricing.placement import Placement
    from select_service.edge.driver.sources import EventSources
    from select_service.edge.driver.waiting_callers import WaitingCallers
    from select_service.edge.replication.plane import ReplicaConnections
    from select_service.edge.state.keeper import Keeper
    from select_service.edge.tracing.spans import Tracing

_log = logging.getLogger("select_service")


class EffectsExecutor:
    """Carries out the effects of one driver.

    Attributes:
        hurry: set to run housekeeping at once.
        replicas: the replica plane, while there is one.
    """

    sources: EventSources  # set later, like `waiting`: building either needs `carry_out`
    waiting: WaitingCallers

    def __init__(self, keeper: Keeper | None, tracing: Tracing | None) -> None:
        """Accept effects from now on.

        Args:
            keeper: notified of possible changes.
            tracing: adds the ids of the request to log lines.
        """
        self._keeper, self._tracing = keeper, tracing
        self.hurry = asyncio.Event()
        self.replicas: ReplicaConnections | None = None

    def carry_out(self, effects: Effects) -> None:
        """Carry out all effects, without waiting."""
        if self._keeper is not None:
            self._keeper.journal.note()
        if effects is NOTHING or not effects:
            return
        self.sources.follow(effects)
        if effects.more:
            self.hurry.set()
        if effects.answered:
            self.waiting.answer(effects.answered)
        if self.replicas is not None:
            self.replicas.carry_out(effects)
        for placement, ticket in effects.decided:
            self._log_decision(placement, ticket)
        for change in effects.trusted:
            _log_trust(change)
        for ejection in effects.ejected:
            _log_ejection(ejection)

    def _log_decision(self, placement: Placement, ticket: Ticket) -> None:
        with contextlib.nullcontext() if self._tracing is None else self._tracing.about(ticket):
            _log.debug("Selected worker", extra=_decision_facts(placement) | _ids_of(ticket))


def _decision_facts(placement: Placement) -> dict[str, Any]:
    """Return the fields of the reference's "Selected worker" log line."""
    weights, (device, host, disk) = placement.weights, placement.held
    return {
        "worker_id": placement.worker.worker_id,
        "dp_rank": placement.dp_rank,
        "logit": placement.cost,
        "effective_cached_blocks": float(device)
        + weights.host_cache_hit_weight * host
        + weights.disk_cache_hit_weight * disk,
        "host_pinned_blocks": host,
        "disk_blocks": disk,
        "total_kv_blocks": placement.worker.spec.total_kv_blocks,
    }


def _ids_of(ticket: Ticket) -> dict[str, str]:
    ids = {
        "selection_id": ticket.request.selection_id,
        "reservation_id": ticket.reservation_id,
    }
    return {name: value for name, value in ids.items() if value is not None}


def _place(changed: TrustChange | RankEjection) -> dict[str, Any]:
    """Return the fields that name the rank."""
    return changed.rank._asdict() | changed.scope._asdict()


def _log_trust(change: TrustChange) -> None:
    facts = _place(change) | {
        "trust": round(change.trust, 4),
        "missing_share": round(change.missing_share, 4),
        "reasons": ",".join(change.reasons),
    }
    if change.reasons:
        _log.warning("a rank's index counts for less", extra=facts)
    else:
        _log.info("a rank's index counts in full again", extra=facts)


def _log_ejection(ejection: RankEjection) -> None:
    change = ejection.change
    facts = _place(ejection) | {"reason": change.reason, "failures": change.failures}
    if change.is_ejected:
        _log.warning("a rank is passed over", extra=facts)
    elif change.is_alive:
        _log.info("a rank is no longer passed over", extra=facts)
    else:
        _log.info("a rank is due for a probe", extra=facts)
