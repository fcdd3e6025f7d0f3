"""A random service that is recorded: everything that decides, in every mixture a seed brings.

Models and tenants, ranks, roles, taints, tiers, shared prompts, temperatures, caps and queues,
cache thresholds, pairs, batches, sessions, leases that end, workers that come, drain and go,
doubted indexes; either policy, with terms of its own now and then.
What was answered is written down beside, by who asked: a witness of its own.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from indexer.core.packing import pack_u64
from indexer.core.registry import StreamRegistry
from indexer.types import Scope, Tier, WorkerRank
from select_service.core.admission.queue import Ticket
from select_service.core.effects import Effects
from select_service.core.instrumentation.instrumented import CoreObservers
from select_service.core.instrumentation.recorder import Recorder
from select_service.core.recording.encoder import Packer, message
from select_service.core.recording.items import FRAME, LENGTH, OPENING, End, Header, Item
from select_service.core.recording.notes import Note
from select_service.core.service import SelectionCore
from select_service.edge.state.recording_file import RecordedRng
from select_service.errors import ServiceError
from select_service.types import (
    Answer,
    CacheThreshold,
    CoreLimits,
    LeaseRequest,
    PairSelection,
    PinnedWorker,
    RouterConfig,
    RouterConfigOverride,
    RoutingConstraints,
    SelectAndReserveRequest,
    Selection,
    SelectPairRequest,
    SelectRequest,
    WorkerSpec,
)
from select_service.types.admission import AdmissionSettings
from select_service.types.batches import SelectBatchItem, SelectBatchRequest
from select_service.types.shadow import ShadowSettings
from select_service.types.workers import DrainRequest

TAINTS = ("a", "b", "c")
SCOPES = (Scope("m", "default"), Scope("m", "other"), Scope("n", "default"))
FRAME_BYTES = 2000


class Cassette:
    """A Sink that keeps everything: the bytes of one file.

    With `is_whole` nothing is left out because it was told before, and all is one frame.
    """

    def __init__(self, config: RouterConfig, *, is_whole: bool = False) -> None:
        self._is_whole = is_whole
        self.draws: list[float | int] = []
        self.notes = 0
        self._packer = Packer()
        self._raw = bytearray()
        self._frames = bytearray(OPENING)
        self.add(Header("test", "cassette", 1, 0.0, 0.0, config))

    def put(self, note: Note, size: int) -> bool:
        assert size > 0
        self.notes += 1
        if self._is_whole:
            self._packer.begin()
        for item in self._packer.pack(note):
            if item is not None:
                self.add(item)
        return True

    def leave_out(self) -> None:
        raise AssertionError("there is room for everything")

    def add(self, item: Item) -> None:
        self._raw += message(item)
        if len(self._raw) > FRAME_BYTES and not self._is_whole:
            self.end_frame()

    def items(self) -> Iterator[bytes]:
        """Yield what was packed since the last frame ended, item by item."""
        at = 0
        while at < len(self._raw):
            (size,) = LENGTH.unpack_from(self._raw, at)
            yield bytes(self._raw[at + LENGTH.size :][:size])
            at += LENGTH.size + size

    def end_frame(self) -> None:
        body = zlib.compress(bytes(self._raw), 1)
        self._frames += FRAME.pack(len(body), zlib.crc32(body)) + body
        self._raw.clear()

    def into(self, path: Path) -> Path:
        """Write the file."""
        self.add(End(0.0, self.notes, is_last=True))
        self.end_frame()
        path.write_bytes(bytes(self._frames))
        return path


class RecordedFleet:
    """A random service, what happens to it, and what was answered."""

    def __init__(
        self,
        seed: int,
        *,
        blocks: int = 140,
        block_size: int = 4,
        is_whole: bool = False,
        kv_pull: bool = False,
        admission: AdmissionSettings | None = None,
    ) -> None:
        self.draw = draw = random.Random(seed)
        self.block_size = block_size
        self.config = RouterConfig(
            use_kv_events=False,
            kv_pull=kv_pull,
            temperature=draw.choice([0.0, 0.0, 0.0, 0.7]),
            overlap_score_credit=draw.choice([1.0, 1.0, 0.3]),
            overlap_score_credit_decay=draw.choice([0.0, 0.0, 0.0, 1.3]),
            prefill_load_scale=draw.choice([1.0, 1.0, 0.0, 2.7]),
            track_prefill_tokens=draw.random() < 0.9,
            queue_threshold=draw.choice([16.0, 1.0]),
            policy=draw.choice(["kv-cost", "first-token"]),
            decode_load_scale=draw.choice([None, None, None, 0.0, 0.4]),
            delay_scale=draw.choice([None, None, None, 0.0, 2.5]),
            eviction_scale=draw.choice([None, None, None, 0.0, 1.5]),
            expects_booked=draw.choice([None, None, None, False, True]),
            context_load_scale=random.Random(f"context {seed}").choice(
                [None, None, None, 0.0, 0.7]
            ),
            pace_scale=random.Random(f"pace {seed}").choice([None, None, None, 0.0, 0.03]),
            interference_scale=random.Random(f"interference {seed}").choice([None, None, 0.0, 0.4]),
            slowness_scale=random.Random(f"slowness {seed}").choice([None, None, 0.0, 0.4]),
        )
        if draw.random() < 0.4 and admission is None:
            admission = AdmissionSettings(
                mode="token-capacity",
                max_inflight=draw.choice([None, 2, 4]),
                cache_hit_threshold=draw.choice([0.0, 0.0, 0.6]),
            )
        self.recorded_file = Cassette(self.config, is_whole=is_whole)
        self.core = SelectionCore(
            *(StreamRegistry(), self.config, RecordedRng(self.recorded_file.draws, seed)),
            limits=CoreLimits(
                decision_ring=draw.choice([0, 64]),
                reservation_ttl_s=20.0,
                session_ttl_s=draw.choice([0.0, 10.0]),
            ),
            admission=admission,
            watch=CoreObservers(decision_recorder=Recorder(self.recorded_file)),
        )
        self.now = 100.0
        if seed % 2:  # what looks on draws from a copy, and leaves no trace
            looks_on = ShadowSettings(weights={"temperature": 0.7}, sample=1.0, cost_max=1.0)
            self.core.follow_shadow(looks_on, self.now)
        self.has_roles = not seed % 3
        self.prompts = [[draw.getrandbits(64) for _ in range(blocks)] for _ in range(3)]
        self.answers: dict[str, tuple[Any, ...]] = {}  # kind and ranks, by id
        self.refusals = 0
        self.waiting: list[Ticket] = []
        self.live: list[str] = []
        self.count = 0
        self.batch_samples = 0
        for worker_id in range(draw.randint(2, 9)):
            self.worker(worker_id)
        for _ in range(draw.randint(0, 12)):
            self.hold()

    def play(self, steps: int) -> None:
        """Let so many things happen."""
        likely = [self.ask, self.ask, self.ask, self.ask, self.report, self.report, self.hold]
        rare = [self.batch, self.churn, self.wait, self.doubt]
        for _ in range(steps):
            self.draw.choice(likely if self.draw.random() < 0.85 else rare)()

    # -- what happens --------------------------------------------------------------------------

    def worker(self, worker_id: int) -> None:
        draw = self.draw
        role = draw.choice(["prefill", "decode", "aggregated", None]) if self.has_roles else None
        scope = SCOPES[worker_id % (1 if self.has_roles else 3)]
        spec = WorkerSpec(
            worker_id=worker_id,
            model_name=scope.model_name,
            tenant_id=scope.tenant_id,
            endpoint=f"http://w{worker_id}",
            block_size=self.block_size,
            data_parallel_size=draw.choice([1, 1, 2]),
            max_num_batched_tokens=draw.choice([None, 256]),
            taints=[taint for taint in TAINTS if draw.random() < 0.5],
            role=role,  # type: ignore[arg-type]
        )
        self.did(self.core.workers.upsert_worker(spec, self.now)[1])

    def hold(self) -> None:
        """A rank has the beginning of some prompt, on one tier or several."""
        partition = self.core.partitions.get(self.draw.choice(SCOPES))
        if partition is None or not partition.fleet_slots.workers:
            return
        worker = self.draw.choice(list(partition.fleet_slots.workers.values()))
        rank = WorkerRank(worker.worker_id, self.draw.choice(list(worker.slots)))
        prompt, parent = self.draw.choice(self.prompts), None
        for at in range(0, min(self.draw.randint(1, 100), len(prompt)), 20):
            piece = prompt[at : at + 20]
            tier = self.draw.choice((Tier.DEVICE, Tier.DEVICE, Tier.HOST_PINNED, Tier.DISK))
            partition.index.store(rank, tier, parent, piece, pack_u64(piece))
            parent = piece[-1]

    def ask(self) -> None:
        draw, core = self.draw, self.core
        self.count += 1
        asked, kind = {**self.wishes(), "selection_id": f"s{self.count}"}, draw.random()
        verb: Any
        if kind < 0.4:
            request, verb = SelectRequest(**asked), core.selection.select
        elif kind < 0.7 or not self.has_roles:
            request = SelectAndReserveRequest(reservation_id=f"r{self.count}", **asked)
            verb = core.selection.select_and_reserve
        else:
            request = SelectPairRequest(reservation_id=f"p{self.count}", **asked)
            verb = core.selection.select_and_reserve
        try:
            answer, effects = verb(request, self.now)
        except ServiceError as error:
            self.refused(error)
            return
        self.did(effects)
        if isinstance(answer, Ticket):
            self.waiting.append(answer)
        else:
            self.answered(answer)

    def wishes(self) -> dict[str, Any]:
        draw = self.draw
        prompt, scope = draw.choice(self.prompts), draw.choice(SCOPES[: 1 if self.has_roles else 3])
        blocks = draw.randint(1, len(prompt))
        own = [draw.getrandbits(64) for _ in range(draw.randint(0, 3))]
        hashes = prompt[:blocks] + own
        asked: dict[str, Any] = {
            "model_name": scope.model_name,
            "tenant_id": scope.tenant_id,
            "block_hashes": hashes,
            "sequence_hashes": hashes,
            "isl_tokens": len(hashes) * self.block_size + draw.randint(0, 3),
        }
        if draw.random() < 0.5:
            asked["session_id"] = draw.choice("abcde")
        odd = draw.random()
        if odd < 0.06:
            asked["allowed_worker_ids"] = draw.sample(range(9), 4)
        elif odd < 0.12:
            asked["pinned_worker"] = PinnedWorker(draw.randrange(9), 0)
        elif odd < 0.2:
            asked["routing_constraints"] = RoutingConstraints(
                [draw.choice(TAINTS)] if draw.random() < 0.3 else [], {draw.choice(TAINTS): 1.5}
            )
        elif odd < 0.3:
            asked["router_config_override"] = RouterConfigOverride(
                overlap_score_credit=draw.choice([None, 0.2]),
                router_temperature=draw.choice([None, 0.5, 0.0]),
            )
        elif odd < 0.4:
            asked["cache_hit_threshold"] = draw.choice([0.0, 0.5, 1.0])
            asked["on_cache_threshold"] = draw.choice(["reject", "fallback"])
        elif odd < 0.45:
            asked["expected_output_tokens"] = 40
        return asked

    def batch(self) -> None:
        draw = self.draw
        items: list[Any] = []
        for _ in range(draw.randint(1, 4)):
            self.count += 1
            asked = self.wishes()
            asked.pop("pinned_worker", None)
            n = draw.randint(1, 6)
            items.append((SelectBatchItem(reservation_id=f"w{self.count}", n=n, **asked), b""))
        wants = SelectBatchRequest(requests=[], reserve=draw.random() < 0.5)
        steps = self.core.batch_selection.begin(wants, items).steps(self.now)
        try:
            self.did(next(steps))
            while True:
                if draw.random() < 0.05:
                    self.report()  # others go on meanwhile
                elif draw.random() < 0.01:
                    self.churn()
                self.did(steps.send(self.now))
        except StopIteration as done:
            for result in done.value.results:
                if isinstance(result.selection, Selection) and wants.reserve:
                    self.live.append(str(result.selection.reservation_id))
                self.batch_samples += 1

    def report(self) -> None:
        """Somebody's prompt is computed, a block is full, a request is over."""
        if not self.live:
            return
        name, what = self.draw.choice(self.live), self.draw.randrange(3)
        try:
            if what == 0:
                self.did(self.core.reservations.prefill_complete(name, self.now))
            elif what == 1:
                self.did(self.core.reservations.output_block(name, None, self.now))
            else:
                self.live.remove(name)
                self.did(self.core.reservations.free(name, self.now))
        except ServiceError:
            return

    def churn(self) -> None:
        worker_id, what = self.draw.randrange(9), self.draw.randrange(4)
        try:
            if what == 0:
                self.did(self.core.workers.delete_worker(worker_id, self.now)[1])
            elif what == 1:
                self.did(self.core.drains.drain(worker_id, DrainRequest(), self.now)[1])
            elif what == 2:
                self.did(self.core.drains.undrain(worker_id, self.now)[1])
            else:
                self.worker(worker_id)
        except ServiceError:
            return

    def wait(self) -> None:
        """Time passes; bookings and leases expire."""
        self.now += self.draw.choice([0.3, 2.0, 25.0])
        if self.draw.random() < 0.3:
            self.did(
                self.core.reservations.open_lease(
                    LeaseRequest(lease_id=f"l{self.now}", owner="o", ttl_s=5.0), self.now
                )[1]
            )
        more = True
        while more:
            more, effects = self.core.tick(self.now)
            self.did(effects)

    def doubt(self) -> None:
        """A rank's index counts for less from now on; or for all again.

        Told by the verb the service tells it with: the column has room for more than there are.
        """
        partition = self.core.partitions.get(self.draw.choice(SCOPES))
        if partition is not None:
            for slot in range(partition.index.capacity):
                if self.draw.choice([True, False]):
                    partition.trust.note_freshness(slot, 0.5, ("lag",))
                else:
                    partition.trust.note_freshness(slot, 1.0, ())

    # -- what was answered ---------------------------------------------------------------------

    def did(self, effects: Effects) -> None:
        for ticket in effects.answered:
            if ticket not in self.waiting:
                continue
            self.waiting.remove(ticket)
            if isinstance(ticket.answer, ServiceError):
                self.refused(ticket.answer)
            else:
                assert ticket.answer is not None
                self.answered(ticket.answer)

    def answered(self, answer: Answer) -> None:
        if isinstance(answer, CacheThreshold):
            self.answers[str(answer.selection_id)] = ("cache_threshold",)
            return
        if isinstance(answer, PairSelection):
            self.live.append(answer.reservation_id)
            legs = [answer.decode] if answer.prefill is None else [answer.decode, answer.prefill]
            ranks = [(leg.worker_id, leg.dp_rank) for leg in legs]
            self.answers[answer.selection_id or ""] = ("pair", *ranks)
            return
        if answer.reservation_id:
            self.live.append(str(answer.reservation_id))
        self.answers[str(answer.selection_id)] = ("placed", (answer.worker_id, answer.dp_rank))

    def refused(self, _: ServiceError) -> None:
        self.refusals += 1
