"""Requests that may take a pair, and advice on those that did not ask for one.

Stands between the verbs of selection and three rooms: who may be chosen (`roles.py`), what costs
less (`pairing.py`), and the booking of it (`pairs.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from select_service.core.pairing import Question, plan
from select_service.errors import NoEligibleWorker, NoTransfer, NoWorkerForRole

if TYPE_CHECKING:
    import random

    from select_service.core.columns import Rows, Slots
    from select_service.core.counters import Counters
    from select_service.core.effects import Effects
    from select_service.core.pairing import Plan
    from select_service.core.pairs import Pairs
    from select_service.core.partition import Partition
    from select_service.core.prompt import Prompt
    from select_service.core.queue import Ticket
    from select_service.core.roles import Legs
    from select_service.core.scoring import Weights
    from select_service.pair_types import PairSelection
    from select_service.types import Advice, SelectRequest


class Matchmaker:
    """Finds pairs, and says when one would be better."""

    def __init__(
        self, pairs: Pairs, counters: Counters, rng: random.Random, *, transfer_cost: float
    ) -> None:
        """Remember whom to ask.

        Args:
            pairs: books what is found.
            counters: count the advice.
            rng: draws ties.
            transfer_cost: of moving one block, in blocks of prefill.
        """
        self.pairs = pairs
        self._advised = counters.advised
        self._rng = rng
        self._transfer_cost = transfer_cost

    def serve(
        self, ticket: Ticket, rows: Rows, cached: Slots | None, now: float, effects: Effects
    ) -> tuple[PairSelection, Effects]:
        """Book a pair, or the one rank that does better, for a request that need not wait.

        Args:
            ticket: the request.
            rows: the candidates it may use now, of the whole and of the prefill leg.
            cached: who holds enough of the prompt, if a threshold is in force.
            now: monotonic seconds.
            effects: to add to.

        Raises:
            ServiceError: nobody is left, or as `Pairs.book`.
        """
        partition, request = ticket.partition, ticket.request
        legs = partition.legs(request)
        if not legs.can_pair or partition.roles.may_move(legs):  # else it says why it is no pair
            legs = _within(legs, rows)
        found = plan(self._question(ticket), legs, self._rng, cached=cached)
        if found.mode == "disaggregated":
            return self.pairs.book(ticket, found, now, effects)
        if not len(found.whole):
            raise _nobody(legs)
        placement = partition.place(request, ticket.prompt, found.whole, ticket.weights, self._rng)
        return self.pairs.book_one(ticket, found, placement, now, effects)

    def _question(self, ticket: Ticket) -> Question:
        return Question(
            *(ticket.partition, ticket.request, ticket.prompt, ticket.weights),
            self._transfer_cost,
        )

    def advise(
        self,
        partition: Partition,
        request: SelectRequest,
        prompt: Prompt,
        weights: Weights,
        cached: Slots | None,
    ) -> Advice:
        """Say whether a pair would do better than one worker."""
        question = Question(partition, request, prompt, weights, self._transfer_cost)
        found = self._plan(question, cached)
        key = found.mode, found.reason
        self._advised[key] = self._advised.get(key, 0) + 1
        return found.advice(partition)

    def _plan(self, question: Question, cached: Slots | None) -> Plan:
        legs = question.partition.legs(question.request)
        return plan(question, legs, self._rng, cached=cached)


def _within(legs: Legs, rows: Rows) -> Legs:
    """Leave out who is not among the candidates."""
    allowed = np.arange(rows.stop) if isinstance(rows, slice) else rows
    return legs._replace(
        whole=legs.whole[np.isin(legs.whole, allowed)],
        prefill=legs.prefill[np.isin(legs.prefill, allowed)],
    )


def _nobody(legs: Legs) -> NoEligibleWorker:
    if legs.can_pair:
        return NoTransfer()
    if len(legs.prefill) or len(legs.decode):
        return NoWorkerForRole("decode" if len(legs.prefill) else "prefill")
    return NoEligibleWorker()
