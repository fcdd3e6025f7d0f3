"""Several selection services that keep each other informed, as processes, and what they carry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override

from tests.live.http import Answer, exchange
from tests.live.ports import HOST, free_port
from tests.live.server import OURS, OURS_EXTRA, Server
from tests.live.window import WINDOW, View
from tests.wait import block_until

BRISK = (
    *("--replica-heartbeat-s", "0.2", "--replica-timeout-s", "3"),
    *("--replica-output-interval-s", "0.2"),
)
WORKERS = (1, 2)

Loads = dict[tuple[str, str, int, int], tuple[int, int, int]]
"""(model, scope, worker, rank) → prefill tokens, decode blocks, requests."""


@dataclass
class Replica(Server):
    """One service with a replica port; its peers are registered or given as arguments."""

    replica_port: int = field(default_factory=free_port)
    peers: Sequence[str] = ()
    host: str = HOST  # where clients reach it

    def __post_init__(self) -> None:
        own = ("--replica-sync-port", str(self.replica_port))
        peers = ("--replica-sync-peers", ",".join(self.peers)) if self.peers else ()
        self.args = (*self.args, *own, *peers)

    @override
    def request(self, method: str, path: str, body: object = None) -> Answer:
        return exchange(self.port, method, path, body, host=self.host)

    @property
    def replica_endpoint(self) -> str:
        """What others register as their peer."""
        return f"tcp://{HOST}:{self.replica_port}"

    def ask(
        self, method: str, path: str, body: object = None, *, ok: Iterable[int] = (200,)
    ) -> Any:
        """One exchange that must succeed."""
        answer = self.request(method, path, body)
        assert answer.status in ok, (method, path, body, answer.status, answer.json)
        return answer.json

    def add_worker(self, *workers: int, model: str = "default") -> None:
        """Register workers nobody publishes for."""
        for worker_id in workers or WORKERS:
            record = {
                "worker_id": worker_id,
                "model_name": model,
                "endpoint": f"http://w{worker_id}",
                "block_size": 16,
                "max_num_batched_tokens": 1 << 40,
                "kv_events_endpoint": f"tcp://{HOST}:9",
            }
            self.ask("POST", "/workers", record, ok=(201,))

    def listen_to(self, endpoint: str) -> None:
        """Register a peer."""
        self.ask("POST", "/replica_sync/register_peer", {"endpoint": endpoint}, ok=(200, 201))

    def reserve(self, name: str, worker_id: int, hashes: Sequence[int], **fields: object) -> None:
        """Book explicitly, under both names an id may have in one version or another."""
        body = {
            "reservation_id": name,
            "selection_id": name,
            "worker_id": worker_id,
            "sequence_hashes": list(hashes),
            "isl_tokens": 16 * len(hashes),
            "effective_prefill_tokens": 16 * len(hashes),
            **fields,
        }
        self.ask("POST", "/reservations", body, ok=(200, 201))

    def loads(self) -> Loads:
        """What every rank carries."""
        return {
            (scope["model_name"], scope.get("tenant_id", scope.get("routing_group")), *rank): (
                row["potential_prefill_tokens"],
                row["potential_decode_blocks"],
                row["active_requests"],
            )
            for scope in self.ask("GET", "/loads")
            for row in scope["loads"]
            for rank in [(row["worker_id"], row["dp_rank"])]
        }

    def view(self) -> View:
        """Its ledger and its loads at one instant; it has to be started as `WATCHED`."""
        answer = self.request("GET", WINDOW)
        assert answer.status == 200, (answer.raw, self.log_tail())
        return msgspec.json.decode(answer.raw, type=View)

    def load(self, worker_id: int) -> tuple[int, int, int]:
        """Prefill tokens, decode blocks and requests of a worker's rank 0 in the default scope."""
        return self.loads()["default", "default", worker_id, 0]


def ours(folder: Path, name: str, *args: str, port: int | None = None, **fields: Any) -> Replica:
    """A replica of this service, not started yet."""
    if port is not None:
        fields["port"] = port
    fields.setdefault("command", OURS)
    return Replica(folder / f"{name}.log", args=(*OURS_EXTRA, *BRISK, *args), **fields)


def agree(replicas: Iterable[Replica]) -> Loads:
    """Wait until all carry the same; return it."""
    replicas = list(replicas)
    answers: list[Loads] = []

    def are_one() -> bool:
        answers[:] = [replica.loads() for replica in replicas]
        return all(answer == answers[0] for answer in answers)

    block_until(are_one, lambda: f"still apart: {answers}")
    return answers[0]
