"""A running service, workers registered at it, and questions about what it knows of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.live.engine import FakeEngine
from tests.live.server import Server
from tests.wait import block_until

BLOCK_SIZE = 16
MARKER_HASH = 0x4D41_524B_0000_0000  # far from every hash in the golden material
MARKER_TOKEN = 1 << 31
MARKER_GROUP = 9


@dataclass
class Stage:
    """Asks one service; numbers tenants and workers so that tests do not meet each other."""

    server: Server
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def new_tenant(self) -> str:
        """A scope of its own."""
        return f"tenant-{next(self._numbers)}"

    def register(
        self,
        worker_id: int,
        tenant: str,
        endpoints: Mapping[int, str],
        replay_endpoint: str | None = None,
    ) -> None:
        """Register a worker with one event endpoint per rank (ranks from 0 without gaps)."""
        answer = self.server.request(
            "POST",
            "/workers",
            {
                "worker_id": worker_id,
                "tenant_id": tenant,
                "endpoint": f"http://worker-{worker_id}",
                "block_size": BLOCK_SIZE,
                "max_num_batched_tokens": 1 << 40,
                "data_parallel_size": len(endpoints),
                "kv_events_endpoints": {str(rank): e for rank, e in endpoints.items()},
                "replay_endpoint": replay_endpoint,
            },
        )
        record = answer.json
        assert isinstance(record, dict)
        assert record["lifecycle"] == "schedulable", record

    def rows(self, tenant: str, prompt: Mapping[str, Any]) -> dict[tuple[int, int], list[int]]:
        """(worker, rank) → [device, host, disk] blocks of /overlap_scores, cumulative."""
        answer = self.server.request("POST", "/overlap_scores", {**prompt, "tenant_id": tenant})
        assert answer.status == 200, answer.raw
        body: Any = answer.json
        return {
            (r["worker_id"], r["dp_rank"]): [
                r["device_blocks"],
                r["host_pinned_blocks"],
                r["disk_blocks"],
            ]
            for r in body["workers"]
        }

    def wait_for_rows(
        self,
        tenant: str,
        expected: Sequence[tuple[Mapping[str, Any], dict[tuple[int, int], list[int]]]],
        *,
        what: str = "",
    ) -> None:
        """Ask until every prompt shows the expected rows of the ranks named there."""
        for prompt, wanted in expected:
            got: dict[tuple[int, int], list[int]] = {}

            def are_there(prompt: Mapping[str, Any] = prompt, wanted: Any = wanted) -> bool:
                rows = self.rows(tenant, prompt)
                got.clear()
                got.update((rank, rows[rank]) for rank in wanted)
                return bool(got == wanted)

            block_until(
                are_there,
                lambda: (
                    f"{what}: expected {wanted}, got {got}\n  prompt: {str(prompt)[:300]}\n"
                    f"{self.server.log_tail()}"
                ),
            )

    def sync(self, tenant: str, worker_id: int, rank: int, engine: FakeEngine, seq: int) -> None:
        """Publish a marker and wait until it is indexed: all before it has been applied."""
        tokens = [MARKER_TOKEN + seq] * BLOCK_SIZE
        event = {
            "type": "BlockStored",
            "block_hashes": [MARKER_HASH + seq],
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": BLOCK_SIZE,
            "group_idx": MARKER_GROUP,  # whatever kind the test has taught the stream for others
            "kv_cache_spec_kind": "full_attention",
        }
        engine.publish(seq, [0.0, [event], None])
        self.wait_for_rows(
            tenant, [({"token_ids": tokens}, {(worker_id, rank): [1, 1, 1]})], what="marker"
        )
