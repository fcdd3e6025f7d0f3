"""The verbs that only look: loads now, loads with a prompt, and what every rank holds of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.types import OverlapScores, ScopeLoads, SharedCache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from indexer.types import Scope
    from select_service.core.partition import Partition
    from select_service.core.verbs.reading import Reader
    from select_service.types import LoadRow, OverlapScoresRequest, PotentialLoadsRequest


class Inspecting:
    """Answers the inspection routes; changes nothing."""

    def __init__(self, reader: Reader, partitions: Mapping[Scope, Partition]) -> None:
        self._reader = reader
        self._partitions = partitions

    def loads(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[ScopeLoads]:
        """Return the load of every rank, by scope (contract 5.1)."""
        return [
            ScopeLoads(
                *scope, partition.loads(), partition.pending_count, partition.pending_isl_tokens
            )
            for scope, partition in sorted(self._partitions.items())
            if (model_name is None or scope.model_name == model_name)
            and (tenant_id is None or scope.tenant_id == tenant_id)
        ]

    def potential_loads(self, request: PotentialLoadsRequest) -> list[LoadRow]:
        """Return what every rank would carry with this prompt (contract 5.2).

        Raises:
            ServiceError: as in contract 2.
        """
        partition, prompt, weights = self._reader.prompt(request)
        return partition.potential_loads(prompt, weights)

    def overlap_scores(self, request: OverlapScoresRequest) -> OverlapScores:
        """Return what every rank holds of this prompt (contract 5.3).

        Raises:
            ServiceError: as in contract 2.
        """
        partition, prompt, weights = self._reader.prompt(request)
        return OverlapScores(
            partition.index.block_size,
            prompt.blocks,
            partition.overlap_rows(prompt, weights),
            SharedCache(),
        )
