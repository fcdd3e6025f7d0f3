"""Which candidates are left where a request, or its batch, asks for more than a free rank.

`place.py` applies this only where something is asked for: to stay where the session is, to go where
enough of the prompt is cached, or where the batch has planned. Other weights in shadow are put to
work here, too, since they judge the same candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from select_service.core.pricing.estimated_matches import expecting

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from msgspec import UnsetType

    from indexer.core.tiers import Matches
    from select_service.core.admission.cache_hits import CacheHits
    from select_service.core.admission.queue import Ticket
    from select_service.core.columns import Rows
    from select_service.core.decisions.shadow import Shadow, ShadowScoring
    from select_service.core.decisions.shadow_regret import Sighting
    from select_service.core.partition import Partition
    from select_service.core.pricing.placement import Placement
    from select_service.core.reservations.sessions import Sessions
    from select_service.core.routing.other_answers import OtherAnswers
    from select_service.types import Advice, CacheHit, CacheThreshold


class Filtered(NamedTuple):
    """The candidates that are left, and what was found out about them."""

    rows: Rows
    matches: Matches | None  # of the prompt, if it was looked up
    hit: CacheHit | None  # hit rate and threshold, if one is in force
    needs_prefill: bool = False  # no rank reached the threshold, and it goes anyway
    scoring: ShadowScoring | None = None  # by other weights
    refused: CacheThreshold | None = None  # too little is cached on any candidate


class Filters:
    """Applies thresholds, sessions and plans to the candidates of a request."""

    def __init__(
        self,
        *,
        cache_hits: CacheHits,
        advise: Callable[[Ticket, float], Advice | UnsetType],
        other_answers: OtherAnswers,
        rng: random.Random,
    ) -> None:
        self.cache_hits = cache_hits
        self._advise = advise
        self._other_answers = other_answers
        self._rng = rng
        self.sessions: Sessions | None = None  # set where requests may name their session
        self.shadow: Shadow | None = None  # set while other weights run in shadow

    def apply(self, ticket: Ticket, rows: Rows, matches: Matches | None, now: float) -> Filtered:
        """Return the candidates that are left; at least one, unless the request is refused."""
        partition, request, planned = ticket.partition, ticket.request, ticket.planned
        hits = scoring = None
        if planned is not None:
            rows = planned_rows(partition, planned.slot, rows)
        if request.cache_hit_threshold is not None or self.cache_hits.settings.cache_hit_threshold:
            matches = matches or partition.match(ticket.prompt)
            hits = self.cache_hits.filter(partition, request, ticket.prompt, rows, matches)
            if hits.refused is not None:
                hits.refused.advice = self._advise(ticket, now)
                refused = self._other_answers.too_few_hits(ticket, rows, matches, hits, now)
                return Filtered(rows, matches, hits.facts, refused=refused)
            rows = hits.rows
        if planned is not None and planned.shared_tokens:  # a threshold is for what is cached now
            blocks = planned.shared_tokens // partition.index.block_size
            matches = expecting(matches or partition.match(ticket.prompt), planned.slot, blocks)
        if request.session_id is not None:
            rows = self._attached(ticket, rows, _asked_at(ticket, now))
        if self.shadow is not None:
            scoring = self.shadow.watch(ticket, rows, matches, now, self._rng)
            matches = matches if scoring is None else scoring.matches
        hit, needs_prefill = (None, False) if hits is None else (hits.facts, hits.needs_prefill)
        return Filtered(rows, matches, hit, needs_prefill, scoring)

    def _attached(self, ticket: Ticket, rows: Rows, asked_at: float) -> Rows:
        """Return only the rank of the request's session if it stays there; else all rows."""
        session_id = self.session_of(ticket)
        if self.sessions is None or session_id is None:
            return rows
        isl_tokens = ticket.prompt.isl_tokens
        alone = self.sessions.rows(ticket.partition, session_id, rows, isl_tokens, asked_at)
        ticket.in_session = alone is not None
        return rows if alone is None else alone

    def follow_up(
        self, ticket: Ticket, filtered: Filtered, placement: Placement, now: float
    ) -> Sighting | None:
        """Note a choice with its session; return what the shadow says, before it is booked."""
        session_id = self.session_of(ticket)
        sighting = None if filtered.scoring is None else filtered.scoring.score(placement)
        if session_id is not None and self.sessions is not None:
            is_booked = ticket.reservation_id is not None
            self.sessions.note(
                ticket.partition,
                session_id,
                placement.slot,
                now,
                is_booked=is_booked,
                asked_at=_asked_at(ticket, now),
            )
        return sighting

    def session_of(self, ticket: Ticket) -> str | None:
        """Return the session that a request belongs to, where sessions are kept.

        A batch decides for all its requests together, so sessions do not apply to them. An empty
        name is none: whatever fills in a template without a name would share it.
        """
        if self.sessions is None or not self.sessions.is_on or ticket.in_batch:
            return None
        return ticket.request.session_id or None


def _asked_at(ticket: Ticket, now: float) -> float:
    """Return when a request came: waiting for a place is no silence of its session."""
    return now if ticket.since < 0.0 else ticket.since


def planned_rows(partition: Partition, slot: int, rows: Rows) -> Rows:
    """Return only the rank that a batch has planned for a request, if it may be chosen."""
    there = 0 <= slot < rows.stop if isinstance(rows, slice) else bool((rows == slot).any())
    if not there:
        return rows
    alone, admission = np.array([slot], dtype=np.int64), partition.admission
    return alone if admission is None or admission.can_take(alone) else rows
