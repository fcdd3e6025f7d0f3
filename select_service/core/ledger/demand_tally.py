"""The demand of one partition and how it is served: growing sums for capacity planning.

`place.py` and `lifecycle.py` add to them, a handful of additions per request;
`edge/metrics/demand_metrics.py` reads them at scrape time. Refused requests count as demand:
capacity is planned for demand, not for survivors. Times are of our own reservations: from the
booking to the first token (a proxy of TTFT), and from there to the end.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from indexer.types import Scope
    from select_service.core.counters import Counters
    from select_service.types import CoreLimits

FADES_S = 600.0

_SIZES = 65
"""Prompt sizes, by bit length: tokens are counted in 64 bits at most."""


class RankTally:
    """What one rank was chosen for."""

    __slots__ = ("isl_tokens", "prefill_tokens", "selections")

    def __init__(self) -> None:
        self.selections = 0
        self.isl_tokens = 0  # of their prompts
        self.prefill_tokens = 0  # the part of them that was not cached


class DemandTally:
    """Sums of one partition."""

    def __init__(self) -> None:
        self.isl_counts = [0] * _SIZES
        """Requests that were given a worker, by bit_length of their prompt."""
        self.isl_tokens = 0
        self.prefill_tokens = 0  # the part not cached on the chosen worker
        self.refused = 0
        self.first_tokens = 0
        self.ttft_s = 0.0
        self.ended = 0
        self.request_s = 0.0
        self.answered = 0  # ended requests that had reported output
        self.output_tokens = 0
        self.answering_tokens = 0  # output tokens of those whose first token was reported, too
        self.answering_s = 0.0
        self.reused: dict[int, float] = {}
        """Prompt tokens found in a worker's cache, by worker, decaying: how hot its blocks are."""
        self.found_on_departed = 0.0  # the same, of all workers that have left
        self.fades_at = 0.0
        self.forgotten = 0.0  # the part of `isl_tokens` that has decayed
        self.ranks: dict[int, dict[int, RankTally]] = {}
        """By worker that is there, and by its ranks."""

    @property
    def asked_lately(self) -> float:
        """Prompt tokens that were given a worker, decaying like `reused`, a part of them."""
        return self.isl_tokens - self.forgotten

    @property
    def found_lately(self) -> float:
        """Of those, the tokens that were found in a cache."""
        return sum(self.reused.values()) + self.found_on_departed

    def place(
        self,
        worker_id: int,
        dp_rank: int,
        isl_tokens: int,
        prefill_tokens: int,
        counters: Counters,
    ) -> None:
        """Count a prompt that was given a rank, which has to compute `prefill_tokens` of it."""
        counters.selections += 1
        counters.selected_isl_tokens += isl_tokens
        counters.selected_prefill_tokens += prefill_tokens
        self.isl_counts[isl_tokens.bit_length()] += 1
        self.isl_tokens += isl_tokens
        self.prefill_tokens += prefill_tokens
        ranks = self.ranks.get(worker_id)
        if ranks is None:
            ranks = self.ranks[worker_id] = {}
        rank = ranks.get(dp_rank)
        if rank is None:
            rank = ranks[dp_rank] = RankTally()
        rank.selections += 1
        rank.isl_tokens += isl_tokens
        rank.prefill_tokens += prefill_tokens
        if prefill_tokens < isl_tokens:
            found = self.reused.get(worker_id, 0.0)
            self.reused[worker_id] = found + (isl_tokens - prefill_tokens)

    def leave(self, worker_id: int) -> None:
        """A worker has gone, with its cache: the next one of its id has found nothing."""
        self.found_on_departed += self.reused.pop(worker_id, 0.0)
        self.ranks.pop(worker_id, None)

    def fade(self, now: float) -> None:
        """Halve what was reused and asked for every ten minutes; part of housekeeping."""
        if now < self.fades_at:
            return
        has_begun, self.fades_at = self.fades_at > 0, now + FADES_S
        if not has_begun:
            return
        self.reused = {one: tokens / 2 for one, tokens in self.reused.items() if tokens > 1}
        self.found_on_departed /= 2
        self.forgotten += self.asked_lately / 2

    def add_output(self, tokens: int, first_token_at: float, now: float) -> None:
        """Count an ended request with output; `first_token_at` is 0 if it was not reported."""
        self.answered += 1
        self.output_tokens += tokens
        if first_token_at:
            self.answering_tokens += tokens
            self.answering_s += now - first_token_at


# Demand for scopes without workers: how often each was asked for. A scope without workers is
# dropped after a while, and its counters with it; a process that has just started knows no scope at
# all. A fleet that was scaled to zero must learn of the first request that comes all the same:
# it is counted here. Names are cheap to make up, so those that never had a worker here have a table
# of their own, which no tenant fills alone.


class UnservedDemand:
    """Requests by scope; a count only grows while its scope is in here.

    O(1); O(`unserved_scopes_max`) where a scope has to leave for another one.

    Attributes:
        evicted: scopes that had to leave for others.
        elsewhere: requests for scopes that have left, or whose names cannot be shown.
    """

    def __init__(self, limits: CoreLimits) -> None:
        self._limits = limits
        # the one that was asked for last is at the end
        self._known: dict[Scope, int] = {}
        self._strange: dict[Scope, int] = {}
        self.evicted = self.elsewhere = 0

    def note(self, scope: Scope, *, is_known: bool) -> None:
        """Count one more request for a scope."""
        most = self._limits.name_length_max
        if any(len(name) > most or not name.isprintable() for name in scope):
            self.elsewhere += 1
            return
        count = self._strange.pop(scope, 0) + self._known.pop(scope, 0)
        table = self._known if is_known else self._strange
        while len(table) >= self._limits.unserved_scopes_max:
            self._evict(table, scope)
        table[scope] = count + 1

    def _evict(self, table: dict[Scope, int], newcomer: Scope) -> None:
        """Of the tenant that has most scopes in here, drop the one that was not asked for longest.

        A tenant that names many displaces its own, as soon as it has more than others.
        """
        shares = Counter(scope.tenant_id for scope in (*table, newcomer))
        most = max(shares[scope.tenant_id] for scope in table)
        victim = next(scope for scope in table if shares[scope.tenant_id] == most)
        self.elsewhere += table.pop(victim)
        self.evicted += 1

    def rows(self) -> list[tuple[Scope, int]]:
        """Return the counts by scope."""
        return [*self._known.items(), *self._strange.items()]
