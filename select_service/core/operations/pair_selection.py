"""Requests that may take a prefill/decode pair, and advice for those that did not ask for one.

The verbs of selection call it; it combines the candidates of each role (`roles.py`), the cheaper
plan (`pricing/pair.py`) and its booking (`reservations/pairs.py`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET

from select_service.core.pricing.pair import PairQuery, plan
from select_service.errors import NoEligibleWorker, NoTransfer, NoWorkerForRole

if TYPE_CHECKING:
    import random

    from msgspec import UnsetType

    from select_service.core.admission.cache_hits import CacheHits
    from select_service.core.admission.queue import Ticket
    from select_service.core.columns import Rows, Slots
    from select_service.core.counters import Counters
    from select_service.core.fleet.roles import Legs
    from select_service.core.partition import Partition
    from select_service.core.pricing.cost import Terms
    from select_service.core.pricing.pair import PairPlan
    from select_service.core.reservations.pairs import Pairs
    from select_service.types import Advice


class PairSelector:
    """Finds pairs, and advises when a pair would be better."""

    def __init__(
        self,
        pairs: Pairs,
        cache_hits: CacheHits,
        counters: Counters,
        rng: random.Random,
    ) -> None:
        self.pairs = pairs
        self._advised = counters.advised
        self._cache_hits = cache_hits
        self._rng = rng

    def find(self, ticket: Ticket, rows: Rows, now: float) -> tuple[Legs, PairPlan]:
        """Return the candidates of each role, and whether a pair or one rank is cheaper.

        `rows` are the usable candidates, for the whole request and for its prefill leg.

        Raises:
            NoEligibleWorker: no candidate is left.
        """
        partition = ticket.partition
        legs = _within(partition, partition.legs(ticket.request), rows)
        found = self._plan(ticket, legs, now)
        if found.mode != "disaggregated" and not len(found.whole):
            raise _nobody(legs)
        return legs, found

    def advise(self, ticket: Ticket, now: float) -> Advice | UnsetType:
        """Return whether a pair would be cheaper than one worker; UNSET if no worker has a role."""
        if not ticket.partition.fleet_slots.roles.given:
            return UNSET
        found = self._plan(ticket, ticket.partition.legs(ticket.request), now)
        key = found.mode, found.reason
        self._advised[key] = self._advised.get(key, 0) + 1
        return found.advice(ticket.partition.fleet_slots)

    def _plan(self, ticket: Ticket, legs: Legs, now: float) -> PairPlan:
        partition, prompt = ticket.partition, ticket.prompt
        question = PairQuery(
            fleet_slots=partition.fleet_slots,
            request=ticket.request,
            prompt=prompt,
            weights=partition.at_present(ticket.weights),
            block_size=partition.index.block_size,
        )
        found = partition.found(prompt)
        found = partition.pulling(ticket.request, found, prompt, question.weights)
        holders = partial(self._cache_hits.holders, ticket.request, prompt, partition)

        def priced(slots: Slots) -> Terms:
            return partition.terms(prompt, slots, ticket.weights, now, found)

        return plan(question, legs, priced, found, self._rng, holders)


def _within(partition: Partition, legs: Legs, rows: Rows) -> Legs:
    """Drop ranks that are not candidates; `Partition.legs` has already filtered decode ranks."""
    allowed = np.arange(rows.stop) if isinstance(rows, slice) else rows
    legs = legs._replace(whole=legs.whole[np.isin(legs.whole, allowed)])
    if legs.can_pair and partition.fleet_slots.roles.may_move(
        legs
    ):  # else they only explain why no pair is possible
        legs = legs._replace(prefill=legs.prefill[np.isin(legs.prefill, allowed)])
    return legs


def _nobody(legs: Legs) -> NoEligibleWorker:
    if legs.can_pair:
        return NoTransfer()
    if len(legs.prefill) or len(legs.decode):
        return NoWorkerForRole("decode" if len(legs.prefill) else "prefill")
    return NoEligibleWorker()
