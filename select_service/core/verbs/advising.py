"""Which workers are cheapest to lose: the answer to "scale down by so many, but whom?".

A worker that goes takes along what it computes, and the blocks nobody else has. The first is its
active load, in tokens. The second counts as far as those blocks are in use: the cached tokens its
requests found on it lately, times the share of its blocks that nobody else holds. Several are
chosen one after the other: what two hold together is lost with the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.types import WorkerRank
from select_service.drain_types import ScaleDownCandidate

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from indexer.types import Scope
    from select_service.core.fleet.catalog import Worker
    from select_service.core.partition import Partition

__all__ = ["Advising"]

DELETION_COST_MAX: Final = 2**31 - 1
"""Of `controller.kubernetes.io/pod-deletion-cost`, an int32."""


class _Loss(NamedTuple):
    cost: float
    worker_id: int
    partition: Partition
    worker: Worker
    sole: int
    blocks: int


class Advising:
    """Ranks workers by what their loss would cost."""

    def __init__(self, partitions: Mapping[Scope, Partition]) -> None:
        self._partitions = partitions

    def candidates(
        self, count: int, model_name: str | None, tenant_id: str | None
    ) -> Generator[None, None, list[ScaleDownCandidate]]:
        """Return up to `count` workers, cheapest first; yields between slices of work.

        Workers that drain already come first: they are leaving anyway. O(count x nodes of all
        ranks), a hundred nodes a slice.
        """
        partitions = [
            one
            for one in self._partitions.values()
            if model_name in (None, one.scope.model_name)
            and tenant_id in (None, one.scope.tenant_id)
        ]
        chosen: list[ScaleDownCandidate] = []
        gone: dict[int, int] = {}  # by partition: the mask of ranks that were chosen
        taken: set[int] = set()
        while len(chosen) < count:
            losses = []
            for partition in partitions:
                for worker in list(partition.seating.present.values()):
                    if worker.worker_id in taken:
                        continue
                    loss = yield from _loss(partition, worker, gone)
                    losses.append(loss)
            if not losses:
                break
            best = min(losses, key=lambda one: (one.worker.drain is None, one.cost, one.worker_id))
            taken.add(best.worker_id)
            mask = sum(one.bit for one in best.partition.index.holders_of(_ranks(best.worker)))
            gone[id(best.partition)] = gone.get(id(best.partition), 0) | mask
            chosen.append(_told(best))
        return chosen


def _ranks(worker: Worker) -> list[WorkerRank]:
    return [WorkerRank(worker.worker_id, rank) for rank in worker.slots]


def _loss(
    partition: Partition, worker: Worker, gone: Mapping[int, int]
) -> Generator[None, None, _Loss]:
    ranks, index, ledger = _ranks(worker), partition.index, partition.ledger
    sole = yield from index.sole_blocks(ranks, gone.get(id(partition), 0))
    blocks = sum(sum(index.blocks_of(rank)) for rank in ranks if index.slot_of(rank) is not None)
    load = sum(
        ledger.prefill_tokens(slot) + float(ledger.decode[slot]) * index.block_size
        for slot in worker.slots.values()
    )
    reused = partition.demand.reused.get(worker.worker_id, 0.0)
    hot = reused * sole / blocks if blocks else 0.0
    # cold blocks break ties: they may be asked for again
    cost = load + hot + 1e-3 * sole * index.block_size
    return _Loss(cost, worker.worker_id, partition, worker, sole, blocks)


def _told(loss: _Loss) -> ScaleDownCandidate:
    partition, worker = loss.partition, loss.worker
    ledger = partition.ledger
    slots = list(worker.slots.values())
    return ScaleDownCandidate(
        worker_id=worker.worker_id,
        model_name=partition.scope.model_name,
        tenant_id=partition.scope.tenant_id,
        drains=worker.drain is not None,
        cost_tokens=loss.cost,
        sole_blocks=loss.sole,
        blocks=loss.blocks,
        reused_tokens=partition.demand.reused.get(worker.worker_id, 0.0),
        reservations=sum(int(ledger.requests[slot]) for slot in slots),
        prefill_tokens=sum(ledger.prefill_tokens(slot) for slot in slots),
        decode_blocks=sum(int(ledger.decode[slot]) for slot in slots),
        pod_deletion_cost=min(int(loss.cost), DELETION_COST_MAX),
    )
