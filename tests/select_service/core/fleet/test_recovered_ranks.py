"""Ranks out of a dump: used at once, bound to a time, gone unless a worker claims them."""

from __future__ import annotations

import random

import msgspec
import pytest

from indexer.core.index import KvIndex
from indexer.core.registry import StreamRegistry
from indexer.types import Scope, Tier, WorkerRank
from select_service.core.changes import WORKER
from select_service.core.service import SelectionCore
from select_service.errors import WorkerConflict
from select_service.types import (
    CoreLimits,
    OverlapScoresRequest,
    RouterConfig,
    WorkerPatch,
    WorkerSpec,
)
from tests.indexer.core.indices import pack

SCOPE = Scope("default", "default")
OTHER = Scope("m", "t")


def spec(worker_id: int, **fields: object) -> WorkerSpec:
    body = {
        "worker_id": worker_id,
        "endpoint": "http://w",
        "block_size": 16,
        "kv_events_endpoint": "tcp://127.0.0.1:9",
    }
    return msgspec.convert(body | fields, WorkerSpec)


def core(**limits: float) -> SelectionCore:
    made = SelectionCore(
        StreamRegistry(),
        RouterConfig(),
        random.Random(1),
        limits=CoreLimits(**limits),  # type: ignore[arg-type]
    )
    for scope in (SCOPE, OTHER):
        index = KvIndex(16)
        for worker_id in (1, 2):
            rank = WorkerRank(worker_id, 0)
            index.attach(rank)
            index.store(rank, Tier.DEVICE, None, [1, 2], pack(1, 2))
        made.registry.adopt_index(scope, index)
    made.note_recovered({s: i.ranks() for s, i in made.registry.indexes()}, 0.0)
    return made


def scores(service: SelectionCore) -> dict[int, int]:
    request = OverlapScoresRequest(block_hashes=[1, 2], sequence_hashes=[1, 2], isl_tokens=32)
    rows = service.queries.overlap_scores(request).workers
    return {row.worker_id: row.device_blocks for row in rows}


def tick(service: SelectionCore, now: float) -> None:
    while service.tick(now)[0]:
        pass
    service.check()


def test_a_recovered_index_serves_the_workers_that_come() -> None:
    service = core()
    assert service.workers.workers() == []
    assert service.queries.loads() == []
    service.workers.upsert_worker(spec(1), 1.0)
    assert scores(service) == {1: 2}
    service.check()


def test_block_size_binds_and_the_kind_of_blocks_does_not() -> None:
    service = core()
    record, _ = service.workers.upsert_worker(spec(1, block_size=8), 1.0)
    assert record.lifecycle == "incomplete"
    record, _ = service.workers.upsert_worker(spec(1, is_eagle=True), 1.0)
    assert record.lifecycle == "schedulable"
    record, _ = service.workers.upsert_worker(spec(2), 1.0)
    assert record.lifecycle == "incomplete"
    service.check()


def test_whoever_is_not_claimed_in_time_goes() -> None:
    service = core(recovery_unclaimed_s=60.0)
    service.workers.upsert_worker(spec(1), 1.0)
    tick(service, 59.0)
    assert len(service.recovered) == 4
    tick(service, 60.0)
    index = service.registry.index(SCOPE)
    assert index is not None
    assert index.ranks() == [WorkerRank(1, 0)]
    assert service.registry.index(OTHER) is None, "nobody ever asked for it"
    assert (service.recovered.dropped, len(service.recovered)) == (3, 0)
    assert scores(service) == {1: 2}
    record, _ = service.workers.upsert_worker(
        spec(5, model_name="m", tenant_id="t", block_size=4), 61.0
    )
    assert record.lifecycle == "schedulable", "the block size binds nobody any more"


def test_ranks_a_worker_does_not_have_go_too() -> None:
    service = core(recovery_unclaimed_s=60.0)
    service.workers.upsert_worker(spec(1, data_parallel_start_rank=4), 1.0)
    tick(service, 60.0)
    index = service.registry.index(SCOPE)
    assert index is not None
    assert index.ranks() == [WorkerRank(1, 4)]


def test_a_source_at_work_keeps_its_workers() -> None:
    service = core()
    service.workers.sources.add("file")
    record, _ = service.workers.upsert_worker(spec(1), 1.0, "file")
    assert record.source == "file"
    with pytest.raises(WorkerConflict):
        service.workers.upsert_worker(spec(1), 1.0)
    with pytest.raises(WorkerConflict):
        service.workers.upsert_worker(spec(1), 1.0, "kubernetes")
    with pytest.raises(WorkerConflict):
        service.workers.patch_worker(1, WorkerPatch(endpoint="x"), 1.0)
    with pytest.raises(WorkerConflict):
        service.workers.delete_worker(1, 1.0)
    service.workers.upsert_worker(spec(2), 1.0)
    with pytest.raises(WorkerConflict):
        service.workers.delete_worker(2, 1.0, "file")
    service.workers.sources.clear()  # a source that is switched off holds nothing back
    assert service.workers.delete_worker(1, 1.0)[0].source == "file"


def test_the_source_of_a_worker_survives_with_it() -> None:
    """Or a worker that was found would come back as nobody's, and its source could not have it."""
    before, after = core(), core()
    before.workers.upsert_worker(spec(1), 1.0, "file")
    record = before.state.record((WORKER, "1"))
    assert record is not None
    after.state.restore((WORKER, "1"), record, 2.0)
    assert after.workers.worker(1).source == "file"
    after.workers.upsert_worker(spec(1, endpoint="http://new"), 3.0, "file")
