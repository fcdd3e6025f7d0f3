"""The scripted cases of the events reference, bytes in, matched blocks out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from indexer.core.hashing import block_hashes
from indexer.core.index import KvIndex
from indexer.core.stream import EventStream
from indexer.types import Namespace, Scope, WorkerRank
from tests.indexer.encoding import FORMS, encode_batch, message
from tests.indexer.golden import golden
from tests.indexer.naive_index import NaiveIndex

if TYPE_CHECKING:
    from collections.abc import Callable

SEMANTICS = golden("events/tier_semantics.json")
SCOPE = Scope("m", "t")


def _rows(index: Any, hashes: bytes, ranks: list[WorkerRank]) -> dict[str, tuple[int, ...]]:
    if isinstance(index, NaiveIndex):
        found = {rank: index.row(rank, hashes) for rank in ranks}
    else:
        by_slot = index.find_matches(hashes).rows()
        found = {}
        for rank in ranks:
            device, host, disk = by_slot.get(index.slot_of(rank), (0, 0, 0))
            found[rank] = (device, device + host, device + host + disk)
    return {f"{rank.worker_id}/{rank.dp_rank}": row for rank, row in found.items()}


def _query(query: dict[str, Any]) -> bytes:
    infos = query.get("block_mm_infos") or []
    return block_hashes(
        query["token_ids"],
        SEMANTICS["block_size"],
        namespace=Namespace(query.get("lora_name") or "", query.get("cache_salt") or ""),
        mm_hashes=[[m["mm_hash"] for m in info["mm_objects"]] if info else [] for info in infos],
    )


@pytest.mark.parametrize("make", [NaiveIndex, KvIndex])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "case", SEMANTICS["cases"], ids=lambda case: f"{case['group']}-{case['name']}"
)
def test_case(case: dict[str, Any], form: str, make: Callable[[int], Any]) -> None:
    index = make(SEMANTICS["block_size"])
    streams: dict[str, EventStream] = {}
    for step in case["steps"]:
        name = step["stream"]
        if name not in streams:
            rank = WorkerRank(*map(int, name.split("/")))
            streams[name] = EventStream(SCOPE, rank, index, worker_ranks=range(8), has_replay=False)
        stream = streams[name]
        payload = encode_batch(step["events"], form, rank=stream.rank.dp_rank)
        stream.on_live(message(stream.cursor.expected, payload), 0.0)
        stream.check()
        index.check()
    for check in case["checks"]:
        rows = _rows(index, _query(check["query"]), [s.rank for s in streams.values()])
        assert rows == {name: tuple(check["expect"][name]) for name in rows}
        assert not any(any(row) for name, row in check["expect"].items() if name not in rows)
