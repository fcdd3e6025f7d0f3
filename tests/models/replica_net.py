"""A few cores on a bad network under a fake clock: messages are lost, doubled, late and overtaken.

And garbled, where a test asks for it: one bit is another.

Everything random comes from one seed. Messages travel as the bytes they would be on the wire;
snapshots are read part by part while both sides go on living. `stated` is the global observer: all
claims anybody ever stated, and all that were ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from indexer.core.registry import StreamRegistry
from select_service.core.changes import WHOLE
from select_service.core.effects import Effects, Pull
from select_service.core.replication.checksum import (
    GarbledReplicaMessage,
    is_checked,
    with_checksum,
)
from select_service.core.replication.dynamo_events import AddRequestData, ReplicaEnvelope
from select_service.core.replication.message_codec import (
    MalformedReplicaMessage,
    decode_message,
    decode_part,
    encode_message,
    encode_part,
)
from select_service.core.replication.messages import ClaimRecord, Ended, Said, SnapshotHead
from select_service.core.service import ProcessLife, SelectionCore
from select_service.types import CoreLimits, Role, RouterConfig, WorkerSpec

if TYPE_CHECKING:
    from select_service.core.changes import Changes, StateKey

BLOCK_SIZE = 4
TICK_S = 0.1
Key = tuple[int, int]

LIMITS = CoreLimits(
    reservation_ttl_s=0.0,
    dropped_per_turn_max=1,
    replica_heartbeat_s=0.5,
    replica_timeout_s=2.0,
    replica_gap_grace_s=0.1,
    replica_pull_retry_s=0.3,
    replica_pull_timeout_s=2.0,
    replica_orphan_ttl_s=6.0,
    replica_missing_max=6,
    replica_items_per_message_max=3,
    replica_resolved_per_turn_max=2,
)


ROLES: dict[int, Role] = {1: "prefill", 2: "decode"}
"""Of workers; the others take whole requests."""


class Node:
    """One replica; `restart` makes it a new one that knows nothing, `reboot` the same once more.

    `rows` are what it has on disk, if it keeps its state.
    """

    def __init__(self, net: Net, number: int) -> None:
        self.net = net
        self.number = number
        self.is_down = False
        self.has_checksums = True  # as older versions have not
        self.core: SelectionCore
        self.changes: Changes | None = None
        self.rows: dict[StateKey, bytes] = {}
        self.restart()

    def restart(self) -> None:
        self.router_id = self.net.rng.getrandbits(64) | 1
        self.epoch = 1
        self._begin()

    def _begin(self) -> None:
        self.core = SelectionCore(
            StreamRegistry(),
            RouterConfig(use_kv_events=False),
            random.Random(self.net.rng.random()),
            limits=self.net.limits,
            life=ProcessLife(self.router_id, self.epoch),
        )
        self.core.replica_operations.announce(8000 + self.number)

    # -- on disk -------------------------------------------------------------------------------

    def keep(self) -> None:
        """Keep the state on disk from now on, and what was kept before."""
        state = self.core.state
        dropped: list[StateKey] = []
        for key in sorted(self.rows, key=lambda one: state.turn(one[0], self.rows[one])):
            effects = state.restore(key, self.rows[key], self.net.now)
            if effects is None:
                dropped.append(key)
            else:
                assert not effects.published, "nobody is told before all is there"
        assert not state.unreadable
        self.changes = self.core.keep_changes()
        for key in dropped:
            self.changes.mark(*key)

    def flush(self) -> None:
        """Write what has changed, as the journal does before anything is acknowledged."""
        changes = self.changes
        if changes is None:
            return
        rest: list[StateKey] = []
        while (taken := changes.take(rest, ())) is not None:
            key, ordinal = taken
            record = None if key[0] == WHOLE else self.core.state.record(key)
            if record is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = record
            changes.written(key, ordinal)
        changes.durable = changes.marks

    def reboot(self) -> None:
        """Start again from disk; what was not on it is lost."""
        self.epoch += 1
        self.is_down = False
        self._begin()
        self.keep()
        self.core.check()

    def stop(self) -> None:
        """End in good order: everything is written, and the others hear of it."""
        self.core.replica_operations.leave()
        self.tick()
        self.flush()
        self.net.publish(self, self.core.replica_operations.last_word())
        self.is_down = True

    def put_worker(self, worker_id: int) -> None:
        spec = WorkerSpec(
            worker_id=worker_id,
            endpoint=f"http://{worker_id}",
            block_size=BLOCK_SIZE,
            data_parallel_size=2,
            role=ROLES.get(worker_id),
        )
        self.did(self.core.workers.upsert_worker(spec, self.net.now)[1])

    def did(self, effects: Effects) -> None:
        """Carry out what the core asks for."""
        for message in effects.published:
            self.net.publish(self, message)
        for pull in effects.pulls:
            self.net.pull(self, pull)
        if self.changes is not None and self.net.rng.random() < self.net.prompt_writes:
            self.flush()
        self.net.look(self)

    def tick(self) -> None:
        if self.is_down:
            return
        _, expired = self.core.tick(self.net.now)
        if expired:
            self.did(expired)
        for _ in range(3):
            more, effects = self.core.replica_operations.tick(self.net.now)
            self.did(effects)
            if not more:
                break
        if self.changes is not None and self.net.rng.random() < self.net.prompt_writes:
            self.flush()

    def ledger(self) -> dict[str, Any]:
        """Every reservation booked here, with all its load."""
        found: dict[str, Any] = {}
        for scope, partition in self.core.partitions.items():
            for rank, slot in partition.fleet_slots.ranks_and_slots():
                for one in partition.ledger.reservations_on(slot):
                    assert one.reservation_id not in found, "never a double booking"
                    found[one.reservation_id] = (
                        scope,
                        rank,
                        partition.ledger.chain_of(one),
                        one.prefill_tokens,
                        one.prefill_done,
                        one.output_blocks,
                        one.faded_outputs,
                        one.output_fraction,
                        one.selection_id,
                    )
        return found


class Net:
    """Nodes, the wires between them, and the clock."""

    def __init__(self, seed: int, nodes: int, limits: CoreLimits = LIMITS) -> None:
        self.limits = limits
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.loss = self.doubling = self.garbling = 0.0
        self.delay_s = 0.01
        self.cut: set[frozenset[int]] = set()
        self.stated: dict[Key, str] = {}
        self.ended: set[Key] = set()
        self.dead_routers: set[int] = set()
        self._events: list[tuple[float, int, Any]] = []
        self._order = count()
        self.lost = 0
        self.garbled = 0
        self.looks = 0
        self.prompt_writes = 0.7  # how often what nobody waits for is on disk at once
        self.looks_per_check = 10  # a core's own promises cost most of the time
        self.promise: Callable[[Node], None] | None = None  # what a test asks for besides
        self.nodes = [Node(self, number) for number in range(nodes)]

    def look(self, node: Node) -> None:
        """A core has done something: it must have kept its promises."""
        self.looks += 1
        if self.looks % self.looks_per_check == 0:
            node.core.check()
        if self.promise is not None:
            self.promise(node)

    # -- the wire ------------------------------------------------------------------------------

    def at(self, when: float, what: Any) -> None:
        heappush(self._events, (when, next(self._order), what))

    def publish(self, source: Node, message: Any) -> None:
        self.observe(source, message)
        topic, payload = encode_message(message)
        if source.has_checksums:
            payload = with_checksum(payload)
        for node in self.nodes:
            if node is source or node.is_down or source.is_down:
                continue
            copies = 1 + (self.rng.random() < self.doubling)
            for _ in range(copies):
                if self.rng.random() < self.loss or self.is_cut(source, node):
                    self.lost += 1
                    continue
                late = self.rng.expovariate(1 / self.delay_s)
                told = payload
                if self.garbling and self.rng.random() < self.garbling:
                    told = self.garble(payload)
                self.at(self.now + late, self.delivery(source, node, topic, told))

    def garble(self, payload: bytes) -> bytes:
        self.garbled += 1
        told = bytearray(payload)
        told[self.rng.randrange(len(told))] ^= 1 << self.rng.randrange(8)
        return bytes(told)

    def delivery(self, source: Node, node: Node, topic: bytes, payload: bytes) -> Any:
        core = node.core

        def deliver() -> None:
            if node.core is not core or node.is_down:  # it has restarted since
                return
            try:
                checked, message = is_checked(payload), decode_message(topic, payload)
            except (GarbledReplicaMessage, MalformedReplicaMessage):
                assert self.garbled
                return
            peer = f"tcp://n{source.number}"
            node.did(core.replica_operations.receive(peer, message, self.now, checked=checked))

        return deliver

    def is_cut(self, one: Node, other: Node) -> bool:
        return frozenset((one.number, other.number)) in self.cut

    def observe(self, source: Node, message: Any) -> None:
        """Write down what is stated, as somebody would who hears everything."""
        if isinstance(message, ReplicaEnvelope):
            event, stamp = message.event, message.select_service
            assert event is not None
            assert stamp is not UNSET
            if isinstance(event.data, AddRequestData):
                self.stated[source.router_id, stamp.seq] = event.request_id
            elif event.data == "Free":
                self.ended.update((owner, born) for owner, born in stamp.of)
        elif isinstance(message, Said):
            for item in message.items:
                if isinstance(item, ClaimRecord):
                    self.stated[source.router_id, item.born] = item.reservation_id
                elif isinstance(item, Ended):
                    self.ended.add((item.owner, item.born))

    # -- pulls ---------------------------------------------------------------------------------

    def pull(self, asker: Node, pull: Pull) -> None:
        core = asker.core
        if not 0 <= pull.http_port - 8000 < len(self.nodes):  # a garbled one: nobody is there
            assert self.garbled
            asker.did(
                core.replica_operations.snapshot_end(pull.router_id, self.now, complete=False)
            )
            return
        source = self.nodes[pull.http_port - 8000]
        parts: Iterator[Any] | None = None
        origin = source.core

        def go_on() -> None:
            nonlocal parts, origin
            if asker.core is not core or asker.is_down:
                return
            if parts is None:
                source.flush()
                origin, parts = source.core, source.core.replica_operations.snapshot(self.now)
            if source.changes is not None and source.core is not origin:  # the connection broke
                asker.did(
                    core.replica_operations.snapshot_end(pull.router_id, self.now, complete=False)
                )
                return
            if source.is_down or self.is_cut(asker, source) or self.rng.random() < self.loss / 3:
                asker.did(
                    core.replica_operations.snapshot_end(pull.router_id, self.now, complete=False)
                )
                return
            if not self.some_parts(asker, pull, parts):
                self.at(self.now + self.rng.expovariate(1 / self.delay_s), go_on)

        self.at(self.now + self.rng.expovariate(1 / self.delay_s), go_on)

    def some_parts(self, asker: Node, pull: Pull, parts: Iterator[Any]) -> bool:
        """Hand over a few parts; True when that was the last of it."""
        core = asker.core
        for _ in range(self.rng.randint(1, 4)):
            try:
                part = next(parts, None)
            except RuntimeError:
                raise AssertionError("a snapshot that broke off") from None
            if part is None:
                asker.did(
                    core.replica_operations.snapshot_end(pull.router_id, self.now, complete=True)
                )
                return True
            part = decode_part(encode_part(part))
            if isinstance(part, SnapshotHead):
                if not core.replica_operations.snapshot_begin(pull, part, self.now):
                    asker.did(
                        core.replica_operations.snapshot_end(
                            pull.router_id, self.now, complete=False
                        )
                    )
                    return True
            else:
                asker.did(core.replica_operations.snapshot_part(pull.router_id, part, self.now))
        return False

    # -- time ----------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Let time pass; every node has its ticks."""
        until = self.now + seconds
        while self.now < until:
            step = min(self.now + TICK_S, until)
            while self._events and self._events[0][0] <= step:
                self.now, _, what = heappop(self._events)
                what()
            self.now = step
            for node in self.nodes:
                node.tick()

    def settle(self, seconds: float) -> None:
        """A good network from now on."""
        self.loss = self.doubling = self.garbling = 0.0
        self.delay_s = 0.01
        self.cut.clear()
        self.run(seconds)

    def crash(self, node: Node) -> None:
        """It is gone with all it knew, and a new one takes its place."""
        self.dead_routers.add(node.router_id)
        node.restart()

    def kill(self, node: Node) -> None:
        """It is gone, and nobody takes its place."""
        self.dead_routers.add(node.router_id)
        node.is_down = True

    def expected(self) -> dict[str, Key]:
        """Which claim should be booked for each id, for somebody who heard everything."""
        winners: dict[str, Key] = {}
        for key, name in self.stated.items():
            if key in self.ended or key[0] in self.dead_routers:
                continue
            winners[name] = min(key, winners.get(name, key))
        return winners
