"""The verbs that only look: loads now, loads with a prompt, and what every rank holds of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.core.pricing.projection import matched
from select_service.types import LoadRow, OverlapRow, OverlapScores, ScopeLoads, SharedCache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from indexer.types import Scope
    from select_service.core.partition import Partition
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.pricing.scoring import Weights
    from select_service.core.verbs.reading import Reader
    from select_service.types import OverlapScoresRequest, PotentialLoadsRequest


class Inspecting:
    """Answers the inspection routes; changes nothing."""

    def __init__(self, reader: Reader, partitions: Mapping[Scope, Partition]) -> None:
        self._reader = reader
        self._partitions = partitions

    def loads(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[ScopeLoads]:
        """Return the load of every rank, by scope."""
        return [
            ScopeLoads(
                *scope, _loads(partition), partition.pending_count, partition.pending_isl_tokens
            )
            for scope, partition in sorted(self._partitions.items())
            if (model_name is None or scope.model_name == model_name)
            and (tenant_id is None or scope.tenant_id == tenant_id)
        ]

    def potential_loads(self, request: PotentialLoadsRequest) -> list[LoadRow]:
        """Return what every rank would carry with this prompt.

        Raises:
            ServiceError: of the scope or the prompt; see `reading.py`.
        """
        partition, prompt, weights = self._reader.prompt(request)
        return _potential_loads(partition, prompt, weights)

    def overlap_scores(self, request: OverlapScoresRequest) -> OverlapScores:
        """Return what every rank holds of this prompt.

        Raises:
            ServiceError: of the scope or the prompt; see `reading.py`.
        """
        partition, prompt, weights = self._reader.prompt(request)
        return OverlapScores(
            partition.index.block_size,
            prompt.blocks,
            _overlap_rows(partition, prompt, weights),
            SharedCache(),
        )


def _loads(partition: Partition) -> list[LoadRow]:
    """Return the present load of every rank."""
    ledger = partition.ledger
    decode, requests = ledger.decode.tolist(), ledger.requests.tolist()
    return [
        LoadRow(*rank, ledger.prefill_tokens(slot), int(decode[slot]), requests[slot])
        for rank, slot in partition.seating.seats()
    ]


def _potential_loads(partition: Partition, prompt: Prompt, weights: Weights) -> list[LoadRow]:
    """Return the load every rank would carry with this prompt."""
    seats, rows = partition.seating.open_seats(), partition.seating.everyone
    projection = partition.project(prompt, rows, weights)
    held, decode = projection.cached_tokens.tolist(), projection.decode.tolist()
    row_of = None if isinstance(rows, slice) else {slot: row for row, slot in enumerate(rows)}
    ledger, requests = partition.ledger, partition.ledger.requests.tolist()
    isl_tokens, track = prompt.isl_tokens, weights.track_prefill_tokens
    answer = []
    for rank, slot in seats:
        row = slot if row_of is None else row_of[slot]
        added = max(0, isl_tokens - int(held[row])) if track else 0
        prefill = ledger.prefill_tokens(slot) + added
        answer.append(LoadRow(*rank, prefill, int(decode[row]), requests[slot]))
    return answer


def _overlap_rows(partition: Partition, prompt: Prompt, weights: Weights) -> list[OverlapRow]:
    """Return the matched blocks of every rank."""
    columns, _ = matched(partition.index, partition.index.find_matches(prompt.block_hashes))
    listed = None if columns is None else [column.tolist() for column in columns]
    rows = []
    for rank, slot in partition.seating.open_seats():
        device = host = disk = 0
        if listed is not None:
            device, host, disk = (int(column[slot]) for column in listed)
        credit = (
            weights.overlap_score_credit * device
            + weights.host_cache_hit_weight * host
            + weights.disk_cache_hit_weight * disk
        )
        beyond = device + host
        rows.append(OverlapRow(*rank, device, beyond, beyond + disk, host, disk, None, credit))
    return rows
