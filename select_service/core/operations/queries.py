"""The read-only verbs: current loads, projected loads with a prompt, and overlap per rank.

What is, is shown of every registered rank, whether or not it drains: loads and overlap. Projected
loads are for callers that choose a rank themselves, so they have only ranks that may be chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET

from select_service.types import LoadRow, OverlapRow, OverlapScores, ScopeLoads, SharedCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexer.types import Scope
    from select_service.core.membership import Membership
    from select_service.core.partition import Partition
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.pricing.weights import Weights
    from select_service.core.routing.read import RequestReader
    from select_service.types import OverlapScoresRequest, PotentialLoadsRequest


class Queries:
    """Answers the inspection routes; changes nothing."""

    def __init__(self, reader: RequestReader, membership: Membership) -> None:
        self._reader = reader
        self._partitions = membership.partitions
        self.load_scopes = membership.scopes

    def loads(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[ScopeLoads]:
        """Return the load of every rank, by scope."""
        loads = map(self.load_of, self.load_scopes(model_name, tenant_id))
        return [one for one in loads if one is not None]

    def load_of(self, scope: Scope) -> ScopeLoads | None:
        """Return the load of every rank of a scope; None if the scope no longer exists."""
        partition = self._partitions.get(scope)
        if partition is None:
            return None
        waiting = partition.pending_count, partition.pending_isl_tokens
        return ScopeLoads(*scope, _loads(partition), *waiting)

    def potential_loads(self, request: PotentialLoadsRequest) -> list[LoadRow]:
        """Return the load every rank that may be chosen would carry with this prompt.

        Raises:
            ServiceError: of the scope or the prompt; see `read.py`.
        """
        partition, prompt, weights = self._reader.prompt(request)
        return _potential_loads(partition, prompt, weights)

    def overlap_scores(self, request: OverlapScoresRequest) -> OverlapScores:
        """Return the blocks of this prompt that every rank holds.

        Raises:
            ServiceError: of the scope or the prompt; see `read.py`.
        """
        partition, prompt, weights = self._reader.view(request)
        return OverlapScores(
            partition.index.block_size,
            prompt.blocks,
            _overlap_rows(partition, prompt, weights),
            SharedCache(),
        )


def _loads(partition: Partition) -> list[LoadRow]:
    """Return the current load of every rank."""
    loads = partition.ledger.loads
    left, requests = loads.prefill_left, loads.requests.tolist()
    decode = loads.decode.astype(np.int64).tolist()
    return [
        LoadRow(worker_id, rank, left[slot], decode[slot], requests[slot])
        for (worker_id, rank), slot in partition.fleet_slots.ranks_and_slots()
    ]


def _potential_loads(partition: Partition, prompt: Prompt, weights: Weights) -> list[LoadRow]:
    """Return the load every rank that may be chosen would carry with this prompt."""
    ledger, rows = partition.ledger, partition.fleet_slots.everyone
    loads = ledger.loads
    left, requests = loads.prefill_left, loads.requests.tolist()
    isl_tokens = prompt.isl_tokens if weights.track_prefill_tokens else 0
    matches = partition.match(prompt)
    # every block is new to every rank
    if matches.empty and prompt.first_hash not in ledger.first_blocks:
        decode = loads.decode.astype(np.int64).tolist()
        blocks = prompt.blocks
        return [
            LoadRow(worker_id, rank, left[slot] + isl_tokens, decode[slot] + blocks, requests[slot])
            for (worker_id, rank), slot in partition.fleet_slots.open_ranks_and_slots()
        ]
    found = partition.found(prompt, matches)
    terms = partition.terms(prompt, rows, weights.kv_cost(), 0.0, found)  # loads, not prices
    held = terms.cached_tokens.tolist()
    decode = terms.decode.astype(np.int64).tolist()
    row_of: Sequence[int] | dict[int, int] = range(len(requests))
    if not isinstance(rows, slice):
        row_of = {slot: row for row, slot in enumerate(rows.tolist())}
    answer = []
    for (worker_id, rank), slot in partition.fleet_slots.open_ranks_and_slots():
        row = row_of[slot]
        added = isl_tokens - int(held[row])
        prefill = left[slot] + added if added > 0 else left[slot]
        answer.append(LoadRow(worker_id, rank, prefill, decode[row], requests[slot]))
    return answer


def _overlap_rows(partition: Partition, prompt: Prompt, weights: Weights) -> list[OverlapRow]:
    """Return the matched blocks of every rank."""
    found, ranks = partition.found(prompt), partition.fleet_slots.ranks_and_slots()
    estimate = partition.estimate
    if found is None:
        return [
            OverlapRow(*rank, 0, 0, 0, 0, 0, None, 0.0, estimate.is_in_force(slot) or UNSET)
            for rank, slot in ranks
        ]
    listed = [column.tolist() for column in found.by_slot(partition.index.capacity)]
    rows = []
    for rank, slot in ranks:
        device, host, disk = (int(column[slot]) for column in listed)
        credit = (
            weights.overlap_score_credit * device
            + weights.host_cache_hit_weight * host
            + weights.disk_cache_hit_weight * disk
        )
        beyond = device + host
        row = *rank, device, beyond, beyond + disk, host, disk, None, credit
        rows.append(OverlapRow(*row, estimate.is_in_force(slot) or UNSET))
    return rows
