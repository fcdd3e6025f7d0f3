"""A service on a replica plane, and what others tell it there."""

from __future__ import annotations

from typing import Any

import msgspec

from select_service.core.replication.dynamo_events import TOPIC, ReplicaEnvelope
from select_service.core.replication.message_codec import decode_message, encode_message
from select_service.core.replication.messages import SnapshotHead
from select_service.types import CoreLimits, RouterConfig
from tests.select_service.core.whole_fleet import Fleet

OURS = 1000
DYNAMO = 77


class Replica(Fleet):
    """A fleet on a replica plane, with two workers."""

    def __init__(
        self, router_id: int = OURS, config: RouterConfig | None = None, **limits: Any
    ) -> None:
        super().__init__(config, router_id=router_id, limits=CoreLimits(**limits))
        self.router_id = router_id
        self.core.replica_operations.announce(8092)
        self.worker(1, data_parallel_size=1)
        self.worker(2)

    def hears(self, *messages: Any, peer: str = "tcp://peer:1") -> None:
        for message in messages:
            self._did(self.core.replica_operations.receive(peer, message, self.now))

    def turn(self, seconds: float = 0.0) -> list[Any]:
        """One turn of the replica plane; what it says."""
        self.now += seconds
        said = []
        more = True
        while more:
            more, effects = self.core.replica_operations.tick(self.now)
            self._did(effects)
            said += effects.published
            self.pulls = effects.pulls
        return said

    def dynamo(self, data: Any, request_id: str = "x", worker_id: int = 1, **more: Any) -> None:
        """One event as the reference publishes it."""
        envelope = {
            "model_name": more.get("model_name", "default"),
            "tenant_id": more.get("tenant_id", "default"),
            "block_size": more.get("block_size", 16),
            "event": {
                "request_id": request_id,
                "worker": {"worker_id": worker_id, "dp_rank": more.get("dp_rank", 0)},
                "data": data,
                "router_id": more.get("router_id", DYNAMO),
                "lora_name": None,
            },
        }
        self.hears(decode_message(TOPIC, msgspec.msgpack.encode(envelope)))


def endings(messages: Any) -> list[Any]:
    """What is told of reservations, without heartbeats and the like."""
    return [one.event.data for one in messages if isinstance(one, ReplicaEnvelope) and one.event]


def add(*hashes: int, tokens: int | None = 40, **more: Any) -> dict[str, Any]:
    hint = None if tokens is None else {"initial_effective_prefill_tokens": tokens}
    return {"AddRequest": {"token_sequence": list(hashes), "prefill_load_hint": hint} | more}


def tell(source: Replica, target: Replica, said: list[Any] | None = None) -> None:
    """Deliver what the last call published, or something else, over the wire."""
    for message in source.effects.published if said is None else said:
        target.hears(decode_message(*encode_message(message)))


def pulled(here: Replica, there: Replica) -> list[Any]:
    """Carry out the pull that `here` asks for; what it says then."""
    (pull,) = here.pulls
    parts = there.core.replica_operations.snapshot(there.now)
    head = next(parts)
    assert isinstance(head, SnapshotHead)
    assert here.core.replica_operations.snapshot_begin(pull, head, here.now)
    for part in parts:
        here.core.replica_operations.snapshot_part(pull.router_id, part, here.now)
    here.core.replica_operations.snapshot_end(pull.router_id, here.now, complete=True)
    return here.turn()


def acquainted() -> tuple[Replica, Replica]:
    """Two who have met: at first sight everybody pulls."""
    here, there = Replica(), Replica(2000)
    here.hears(*there.turn())
    here.turn()
    pulled(here, there)
    here.turn(here.core.limits.replica_pull_retry_s)
    there.now = here.now
    assert here.pulls == []
    return here, there


def silent(here: Replica) -> None:
    here.turn(here.core.limits.replica_timeout_s + 1)
