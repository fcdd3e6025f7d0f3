"""The verbs that only look: loads now, loads with a prompt, and what every rank holds of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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
    return [
        LoadRow(
            rank.worker_id,
            rank.dp_rank,
            ledger.prefill_tokens(slot),
            int(ledger.decode[slot]),
            int(ledger.requests[slot]),
        )
        for rank, slot in partition.seating.seats()
    ]


def _potential_loads(partition: Partition, prompt: Prompt, weights: Weights) -> list[LoadRow]:
    """Return the load every rank would carry with this prompt."""
    seats = partition.seating.open_seats()
    rows = np.array([slot for _, slot in seats], dtype=np.int64)
    projection = partition.project(prompt, rows, weights)
    added = [
        max(0, prompt.isl_tokens - int(cached)) if weights.track_prefill_tokens else 0
        for cached in projection.cached_tokens
    ]
    return [
        LoadRow(
            rank.worker_id,
            rank.dp_rank,
            partition.ledger.prefill_tokens(slot) + added[row],
            int(projection.decode[row]),
            int(partition.ledger.requests[slot]),
        )
        for row, (rank, slot) in enumerate(seats)
    ]


def _overlap_rows(partition: Partition, prompt: Prompt, weights: Weights) -> list[OverlapRow]:
    """Return the matched blocks of every rank."""
    columns, _ = matched(partition.index, partition.index.find_matches(prompt.block_hashes))
    rows = []
    for rank, slot in partition.seating.open_seats():
        device = host = disk = 0
        if columns is not None:
            device, host, disk = (int(column[slot]) for column in columns)
        credit = (
            weights.overlap_score_credit * device
            + weights.host_cache_hit_weight * host
            + weights.disk_cache_hit_weight * disk
        )
        rows.append(
            OverlapRow(
                worker_id=rank.worker_id,
                dp_rank=rank.dp_rank,
                device_blocks=device,
                host_pinned_blocks=device + host,
                disk_blocks=device + host + disk,
                host_pinned_extension_blocks=host,
                disk_extension_blocks=disk,
                shared_beyond_device_blocks=None,
                router_credit_blocks=credit,
            )
        )
    return rows
