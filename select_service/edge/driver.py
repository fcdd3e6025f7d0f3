"""Reads the clock, calls the core, carries out its effects: the only caller of `core/service.py`.

HTTP and embedding both speak to the core through this file. It keeps one future per caller whose
request waits, one timer for housekeeping, and the listeners; it decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UNSET

from indexer.core.registry import Registry
from indexer.edge.addresses import Addresses
from indexer.edge.listener import Listeners
from indexer.errors import EndpointRefused, IndexerError
from indexer.types import EventLossPolicy
from select_service.admission_types import AdmissionSettings
from select_service.core.admission.queue import Ticket
from select_service.core.effects import NOTHING
from select_service.core.fleet.discovery import API
from select_service.core.service import SelectionCore
from select_service.core.shadow.telling import ShadowTelling
from select_service.doctor_types import DoctorLimits
from select_service.edge.batches import Batches
from select_service.edge.clocks import forwards_only
from select_service.edge.dumping import Dumps
from select_service.edge.load_topic import LoadTopic
from select_service.edge.readiness import (
    INDEX_RECOVERY,
    INDEX_SNAPSHOT,
    REPLICA_LEDGERS,
    WORKER,
    LedgersApplied,
    Readiness,
)
from select_service.edge.telling import Teller
from select_service.edge.waves import WaveRunner
from select_service.errors import ReplicaSyncDisabled, ServiceError, ShuttingDown, WorkerNotFound
from select_service.types import (
    DumpLimits,
    PairSelection,
    Ready,
    ReplicaLimits,
    RouterConfig,
    Selection,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from indexer.core.stream import EventStream
    from indexer.edge.recovery import Recovery
    from indexer.types import (
        LinkState,
        PackedHashes,
        ReachSettings,
        RecoveryLimits,
        SnapshotLimits,
        StreamLimits,
    )
    from select_service.admission_types import (
        AdmissionChange,
        AdmissionStatus,
        BusyThreshold,
        BusyThresholdChange,
        BusyThresholds,
        WorkerMetrics,
        WorkerMetricsAnswer,
    )
    from select_service.config import Settings
    from select_service.core.books.leases import Lease
    from select_service.core.effects import Effects, Listen, TrustNews
    from select_service.core.partition import Placement
    from select_service.core.pricing.policy import PolicyBook, PolicyError
    from select_service.core.trust.trusting import TrustSeat
    from select_service.core.waves.waves import Item
    from select_service.drain_types import DrainRequest, DrainStatus, ScaleDownCandidate
    from select_service.edge.discovery.followers import Discovery
    from select_service.edge.doctor import Doctor
    from select_service.edge.replicas.plane import Replicas
    from select_service.edge.security.security import Security
    from select_service.edge.state.keeper import Keeper
    from select_service.edge.state.recording import Recording
    from select_service.edge.state.warm_start import WarmStart
    from select_service.edge.tracing.tracing import Tracing
    from select_service.shadow_types import ShadowSettings, ShadowStatus
    from select_service.types import (
        Answer,
        BatchAnswer,
        BatchRequest,
        CoreLimits,
        LeaseList,
        LeaseRecord,
        LeaseRenewal,
        LeaseRequest,
        LoadRow,
        Operation,
        OperationResult,
        OverlapScores,
        OverlapScoresRequest,
        PotentialLoadsRequest,
        RankTrustRow,
        ReplicaStatus,
        ReservationAnswer,
        ReservationRequest,
        ScopeLoads,
        SelectAndReserveRequest,
        SelectPairRequest,
        SelectRequest,
        TrustSettings,
        TrustTable,
        WorkerPatch,
        WorkerRecord,
        WorkerSpec,
    )
    from select_service.wave_types import SelectBatchRequest, WaveAnswer

S = TypeVar("S", bound="SelectRequest")

_log = logging.getLogger("select_service")

READY_TIMEOUT_S = 120.0
"""How long /ready waits for recoveries unless told otherwise."""

HOUSEKEEPING_S = 1.0
"""Between turns when nothing is left over: how late an expiry may be."""

EXAMINED_AFTER_S = 5.0
"""From the start to the first examination: what it needs is loaded then, and some is there."""

CANDIDATES_SLICE_S = 0.0003
"""How long the look for workers that are cheap to lose may hold the loop."""

SHADOW_SCOPES_LISTED = 100
SHADOW_SLICE = 32
"""Scopes of GET /shadow looked at in one go: some 10 µs each."""


class Driver:
    """One core, its clock and its sockets; only a waiting selection is ever awaited."""

    def __init__(  # noqa: PLR0913, PLR0915 - settings, keyword only, and a line for each
        self,
        config: RouterConfig | None = None,
        *,
        limits: CoreLimits | None = None,
        stream_limits: StreamLimits | None = None,
        on_event_loss: EventLossPolicy = EventLossPolicy.KEEP,
        policies: PolicyBook | PolicyError | None = None,
        replica_sync_port: int | None = None,
        replica_limits: ReplicaLimits | None = None,
        dump_limits: DumpLimits | None = None,
        keeper: Keeper | None = None,
        snapshot_limits: SnapshotLimits | None = None,
        indexer_peers: Sequence[str] = (),
        recovery_limits: RecoveryLimits | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
        admission: AdmissionSettings | None = None,
        security: Security | None = None,
        reach: ReachSettings | None = None,
        tracing: Tracing | None = None,
        doctor_limits: DoctorLimits | None = None,
        trust: TrustSettings | None = None,
        recording: Recording | None = None,
        shadow: ShadowSettings | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the core; sockets are opened by `start`.

        Args:
            config: weights and switches.
            limits: bounds of the core.
            stream_limits: bounds of the event listeners.
            on_event_loss: what becomes of a rank's blocks when lost events cannot be recovered.
            policies: parsed policy file, or why it cannot be used.
            replica_sync_port: where bookings are published; None: nowhere.
            replica_limits: bounds of the replica plane.
            dump_limits: bounds of GET /dump.
            keeper: keeps the state on disk; None: it ends with the process. `close` closes it.
            snapshot_limits: budgets of the index snapshot beside that; None: there is none.
            indexer_peers: base URLs of those who may have an index to start with.
            recovery_limits: budgets of that.
            ready_timeout_s: how long /ready waits for recoveries.
            admission: who is let in at all.
            security: what guards its door, and its keys towards workers and replicas.
            reach: where connections may lead.
            tracing: of some requests; `close` closes it.
            doctor_limits: how often it is looked whether something is wired wrong.
            trust: when what an index says counts for less.
            recording: of all that happens, opened; `close` closes it.
            shadow: weights that look on; None: there are none.
            seed: for ties and temperatures; None: from the system.
            clock: seconds; when it goes back, time stands still.

        Raises:
            ValueError: the settings of admission, trust, or of where to connect, make no sense.
        """
        clock = forwards_only(clock)
        self.addresses = Addresses(reach, clock=clock)
        rng, witness = random.Random(seed), None  # noqa: S311  # nosec B311 - ties, not secrets
        self.recording = recording
        if recording is not None:
            from select_service.core.watching.witness import Witness  # noqa: PLC0415 - for who records

            rng, witness = recording.random(seed), Witness(recording)
        self.witness = witness
        registry = (
            Registry(on_event_loss=on_event_loss)
            if stream_limits is None
            else Registry(on_event_loss=on_event_loss, limits=stream_limits)
        )
        self.core = SelectionCore(
            registry,
            config or RouterConfig(),
            rng,
            policies=policies,
            limits=limits,
            router_id=0 if replica_sync_port is None else _router_id(keeper, rng),
            epoch=1 if keeper is None else keeper.epoch,
            trace_decisions=_log.isEnabledFor(logging.DEBUG),
            admission=admission,
            recorder=None if tracing is None else tracing.recorder,
            witness=witness,
            trust=trust,
            stopwatch=time.perf_counter,
            first_decision=int(time.time() * 1e6),  # noqa: TID251 - as no earlier life's
        )
        self.core.trusting.wall_ahead = time.time() - clock()  # noqa: TID251 - no more than a day off
        self.core.follow_shadow(shadow, clock())
        self.keeper, self.tracing, self.security = keeper, tracing, security
        self.credentials = credentials = None if security is None else security.credentials
        self.replicas: Replicas | None = None
        self._replica_sync_port = replica_sync_port
        self._replica_limits = replica_limits or ReplicaLimits()
        self._dump_limits = dump_limits or DumpLimits()
        self.dumps = Dumps(self.core, self._dump_limits, clock)
        self._clock = clock
        self.readiness = Readiness(ready_timeout_s, clock)
        self.recovery: Recovery | None = None
        # What follows is loaded by those who ask for it: a start should not pay for the others.
        if indexer_peers:
            from indexer.edge.recovery import Recovery  # noqa: PLC0415 - as above

            recovery = self.recovery = Recovery(
                *(registry, indexer_peers, self.core.make_room),
                limits=recovery_limits,
                clock=clock,
                **({} if credentials is None else credentials.for_recovery()),
                addresses=self.addresses,
            )
            self.readiness.wait_for(INDEX_RECOVERY, lambda: recovery.outcome != "running")
        self.warm_start: WarmStart | None = None
        if keeper is not None and snapshot_limits is not None:
            from select_service.edge.state.warm_start import WarmStart  # noqa: PLC0415 - as above

            directory = keeper.journal.store.directory
            self.warm_start = WarmStart(directory, registry, snapshot_limits, clock)
            self.readiness.wait_for(INDEX_SNAPSHOT, self._is_snapshot_judged)
        self.discovery: Discovery | None = None
        """Where workers and replicas are found; set before `start`."""
        if replica_sync_port is not None:
            self.readiness.wait_for(REPLICA_LEDGERS, LedgersApplied(self, clock))
        self._recovering: asyncio.Task[None] | None = None
        self.load_topic = LoadTopic(
            self._hear_load,
            bytes_max=(admission or AdmissionSettings()).load_report_bytes_max,
            ranks_max=self.core.limits.data_parallel_size_max,
        )
        self._held: list[Listen] = []  # event sources that wait until recovery is over
        self._stream_limits = stream_limits
        self._listeners: Listeners | None = None
        self._waiting: dict[Ticket, list[asyncio.Future[Answer]]] = {}
        self._housekeeper: asyncio.Task[None] | None = None
        self._doctor_limits = doctor_limits or DoctorLimits()
        self._doctor: Doctor | None = None
        self._examining: asyncio.Task[None] | None = None
        self._has_namesake = False
        self._deadline: tuple[float, asyncio.TimerHandle] | None = None
        self._hurry = asyncio.Event()
        self.housekeeping_faults = 0
        """Turns of housekeeping that raised, which is a bug."""
        self._batches = Batches(self._operate, clock)
        self._waves = WaveRunner(self._carry_out, clock)
        self._closing = False

    # -- life ----------------------------------------------------------------------------------

    async def start(self, http_port: int = 0, advertise_url: str | None = None) -> None:
        """Open sockets and timers on the running loop.

        Args:
            http_port: where replicas find our snapshot, on the host they listen to.
            advertise_url: or there.

        Raises:
            indexer.errors.EndpointRefused: the replica port cannot be bound.
        """
        self._listeners = self._make_listeners()
        if self.recording is not None:
            self.recording.start(self._clock)
        if self.warm_start is not None:
            await self.warm_start.open(self._listeners)
        if self.keeper is not None:
            await self._restore(self.keeper)
        if self._replica_sync_port is not None:
            from select_service.edge.replicas.plane import Replicas  # noqa: PLC0415 - as in __init__

            self.core.replica_announce(http_port, advertise_url)
            self.replicas = Replicas(
                *(self._replica_sync_port, self.core, self._carry_out, self._replica_limits),
                *(self._clock, self.addresses),
                keys=None if self.credentials is None else self.credentials.replica_keys,
                passport=None if self.credentials is None else self.credentials.passport,
            )
            await self.replicas.pulls.warm_up()
            self._register_again(self.replicas)
        if self.tracing is not None:
            self.tracing.start()
        loop = asyncio.get_running_loop()
        self.readiness.start()
        if self.recovery is not None:
            self._recovering = loop.create_task(self._recover(self.recovery))
        if self.warm_start is not None:
            self.warm_start.start(self.core.membership.sources)
        self._housekeeper = loop.create_task(self._keep_house())
        if self._doctor_limits.interval_s:
            self._examining = loop.create_task(self._examine())
        if self.discovery is not None:
            self.discovery.start()

    def _make_listeners(self) -> Listeners:
        credentials = self.credentials
        listeners = Listeners(
            self.core.registry,
            clock=self._clock,
            limits=self._stream_limits,
            on_load=self.load_topic.hear,
            keys=None if credentials is None else credentials.keys,
            worker_key=None if credentials is None else credentials.worker_key,
            addresses=self.addresses,
            on_refused=self._refuse_source,
            on_message=None if self.recording is None else self._record_message,
        )
        if credentials is not None:
            credentials.when_other_keys.append(listeners.use_keys)
        return listeners

    def announce_leaving(self) -> None:
        """Not ready any more; replicas hear it at once, so that ours is theirs when we are gone."""
        self.readiness.is_leaving = True
        if self.replicas is not None:
            self.replicas.leave()

    @property
    def awaited(self) -> int:
        """What was booked here and is in flight, and requests that wait for a worker."""
        return self.core.desk.bookings.expected

    async def close(self) -> None:
        """Send waiting requests away, stop timers, close sockets. Idempotent."""
        self._closing = True
        if self.discovery is not None:
            await self.discovery.close()
        self._send_away()
        self._wake_at(math.inf)
        self.load_topic.close()
        await self._batches.close()
        await self._waves.close()
        for task in (self._recovering, self._housekeeper, self._examining):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._recovering = self._housekeeper = self._examining = None
        if self.warm_start is not None:
            await self.warm_start.close()
        if self._listeners is not None:
            await self._listeners.close()
            self._listeners = None
        if self.replicas is not None:
            await self.replicas.close()
            self.replicas = None
        self.addresses.close()
        if self.keeper is not None:
            await self.keeper.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        if self.recording is not None:
            await self.recording.close()

    def _send_away(self) -> None:
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(ShuttingDown())
        self._waiting.clear()

    async def _restore(self, keeper: Keeper) -> None:
        """Bring back what is on disk, and write down what changes from now on."""
        dropped = await keeper.restore(self.core.state, self._carry_out, self._clock)
        changes = self.core.keep_changes()
        for key in dropped:
            changes.mark(*key)
        keeper.start(changes, self._release)

    def _is_snapshot_judged(self) -> bool:
        """Whether what an earlier life knew of workers that are there has its verdict."""
        assert self.warm_start is not None
        if self.recovery is not None and self.recovery.outcome == "running":
            return False  # streams are not followed yet
        if self.discovery is not None and not self.discovery.is_settled:
            return False  # nor known
        return self.warm_start.is_judged

    def _register_again(self, replicas: Replicas) -> None:
        for endpoint in self.core.peer_endpoints.endpoints:
            try:
                replicas.register(endpoint)
            except (IndexerError, ServiceError) as error:
                _log.warning("replica peer %s of an earlier life: %s", endpoint, error)

    def _release(self, reservation_id: str) -> None:
        """Take back a booking that nobody has been told of."""
        if self.core.desk.bookings.live(reservation_id) is not None:
            self._carry_out(self.core.free(reservation_id, self._clock()))

    def now(self) -> float:
        """Return the monotonic seconds that everything here is told."""
        return self._clock()

    async def settle(self) -> None:
        """Wait until everything done so far may be acknowledged (embedding; HTTP has its own way).

        Raises:
            ServiceError: the disk refuses.
        """
        if self.keeper is not None and (written := self.keeper.settled()) is not None:
            await written

    async def recovered(self, timeout_s: float) -> bool:
        """Wait until the index is recovered, or will not be, for so long; False if it runs on."""
        if self._recovering is None:
            return True
        done, _ = await asyncio.wait({self._recovering}, timeout=timeout_s)
        return bool(done)

    async def _recover(self, recovery: Recovery) -> None:
        """Let event sources be heard once what a peer knew is in place."""
        try:
            await recovery.run()
            self.core.note_recovered(recovery.recovered, self._clock())
        finally:
            held, self._held = self._held, []
            if self._listeners is not None and not self._closing:
                for listen in held:
                    self._listen(self._listeners, listen)

    async def _keep_house(self) -> None:
        while True:
            more = False
            try:
                # again each time: it may be set, at the latest when a machine hears of NTP
                self.core.trusting.wall_ahead = time.time() - self._clock()  # noqa: TID251
                more, effects = self.core.tick(self._clock())
                self._carry_out(effects)
                self._complain_of_namesakes()
            except Exception:  # noqa: BLE001 - a bug must not end all expiry
                self.housekeeping_faults += 1
                _log.exception("housekeeping failed")
            await (asyncio.sleep(0) if more else self._rest())

    async def _rest(self) -> None:
        """Let housekeeping rest until its next turn, or until there is more to do."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOUSEKEEPING_S):
                await self._hurry.wait()
        self._hurry.clear()

    def _complain_of_namesakes(self) -> None:
        if self.core.replicas.counters.namesakes and not self._has_namesake:
            self._has_namesake = True
            _log.error(
                "another process speaks under our router id, so neither hears the other: "
                "its --state-dir is a copy of ours, and one of both must start from an empty one"
            )

    def reconfigure(self, old: Settings, new: Settings) -> None:
        """Put other settings in force at once; they were judged, see `reloading.py`."""
        for limits, before, after in (
            (self.core.registry.limits, old.stream_limits, new.stream_limits),
            (self._replica_limits, old.replica_limits, new.replica_limits),
            (self._dump_limits, old.dump_limits, new.dump_limits),
        ):
            for name, value in _differing(before, after).items():
                setattr(limits, name, value)
        if self._listeners is not None and old.stream_limits != new.stream_limits:
            self._listeners.look_at_all()
        if old.shadow != new.shadow:
            self.core.follow_shadow(new.shadow, self._clock())
        core = _differing(old.core_limits, new.core_limits)
        admission = _differing(old.admission, new.admission)
        self._carry_out(self.core.reconfigure(core, admission, self._clock()))
        self._note_change("settings", {**core, **admission})

    def _note_change(self, what: str, values: dict[str, object]) -> None:
        if self.witness is not None:
            self.witness.change(self._clock(), what, values)

    # -- workers -------------------------------------------------------------------------------

    def upsert_worker(self, spec: WorkerSpec, source: str = API) -> WorkerRecord:
        """POST /workers, or a source names it."""
        record, effects = self.core.upsert_worker(spec, self._clock(), source)
        return self._listened(record, effects)

    def patch_worker(self, worker_id: int, patch: WorkerPatch) -> WorkerRecord:
        """PATCH /workers/{id}."""
        record, effects = self.core.patch_worker(worker_id, patch, self._clock())
        return self._listened(record, effects)

    def _listened(self, record: WorkerRecord, effects: Effects) -> WorkerRecord:
        """Follow the worker's event sources; a source ZMQ will not connect to puts it out again."""
        self._carry_out(effects)
        if effects.listen:
            record = self.core.worker(record.worker_id)
        return record

    def delete_worker(self, worker_id: int, source: str = API) -> WorkerRecord:
        """DELETE /workers/{id}, or a source names it no longer."""
        record, effects = self.core.delete_worker(worker_id, self._clock(), source)
        self._carry_out(effects)
        return record

    def drain_worker(self, worker_id: int, request: DrainRequest) -> DrainStatus:
        """POST /workers/{id}/drain."""
        status, effects = self.core.drain(worker_id, request, self._clock())
        return self._drain_told(status, effects)

    def undrain_worker(self, worker_id: int) -> DrainStatus:
        """DELETE /workers/{id}/drain."""
        status, effects = self.core.undrain(worker_id, self._clock())
        return self._drain_told(status, effects)

    def _drain_told(self, status: DrainStatus, effects: Effects) -> DrainStatus:
        self._carry_out(effects)
        return self.core.drain_status(status.worker_id) if effects.listen else status

    def drain_status(self, worker_id: int) -> DrainStatus:
        """GET /workers/{id}/drain."""
        return self.core.drain_status(worker_id)

    async def scale_down_candidates(
        self, count: int, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[ScaleDownCandidate]:
        """GET /scale_down_candidates; the loop is let go every few hundred microseconds."""
        asked = self.core.scale_down_candidates(count, model_name, tenant_id)
        until = self._clock() + CANDIDATES_SLICE_S
        while True:
            try:
                next(asked)
            except StopIteration as told:
                found: list[ScaleDownCandidate] = told.value
                return found
            if self._clock() >= until:
                await asyncio.sleep(0)
                until = self._clock() + CANDIDATES_SLICE_S

    def workers(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[WorkerRecord]:
        """GET /workers."""
        return self.core.workers(model_name, tenant_id)

    def ready(self) -> Ready:
        """GET /ready."""
        ready = self.core.ready()
        missing = self.readiness.missing()
        waiting_for = missing if ready.ready else [WORKER, *missing]
        state = UNSET if self.keeper is None else self.keeper.status()
        return Ready(not waiting_for, ready.schedulable_workers, ready.workers, waiting_for, state)

    def is_ready(self) -> bool:
        """Whether GET /ready says so; costs next to nothing."""
        return self.core.reader.schedulable > 0 and not self.readiness.missing()

    # -- the doctor ----------------------------------------------------------------------------

    async def ready_verbose(self) -> Ready:
        """GET /ready?verbose=true: what is wired wrong as well."""
        report = await self.doctor().report()
        return msgspec.structs.replace(
            self.ready(),
            findings=report.findings,
            findings_left_out=report.left_out or UNSET,
        )

    def doctor(self) -> Doctor:
        """Return who examines the fleet."""
        if self._doctor is None:
            from select_service.edge.doctor import Doctor  # noqa: PLC0415 - see `late`

            self._doctor = Doctor(
                *(self.core, self._doctor_limits),
                link_of=self._link_of,
                peers=lambda: [] if self.replicas is None else self.replicas.subscriptions.links(),
                clock=self._clock,
            )
        return self._doctor

    @property
    def diagnosed(self) -> Doctor | None:
        """Who examines the fleet, once there was reason to."""
        return self._doctor

    @property
    def event_handshakes_failed(self) -> Mapping[str, int]:
        """Handshakes with workers that failed, by how."""
        return {} if self._listeners is None else self._listeners.handshakes_failed

    def _link_of(self, stream: EventStream) -> LinkState | None:
        return None if self._listeners is None else self._listeners.link(stream)

    async def _examine(self) -> None:
        await asyncio.sleep(min(EXAMINED_AFTER_S, self._doctor_limits.interval_s))
        await self.doctor().watch()

    # -- selection -----------------------------------------------------------------------------

    def select_now(self, request: SelectRequest, unknown: bytes = b"") -> Answer | Ticket:  # noqa: ARG002 - called as the others are
        """POST /select as far as it goes without waiting; a Ticket goes to `wait`."""
        answer, effects = self.core.select(request, self._clock())
        self._carry_out(effects)
        return answer

    def answer_doors(self, show_hashes: Callable[[PackedHashes], list[int]]) -> None:
        """A door will send answers: have the hashes in them shown its way.

        That holds for the verbs whose name ends in `_now`, and for `wait`.
        """
        self.core.desk.show_hashes = show_hashes

    def select_and_reserve_now(
        self, request: SelectAndReserveRequest, unknown: bytes = b""
    ) -> Answer | Ticket:
        """POST /select_and_reserve as far as it goes without waiting; a Ticket goes to `wait`."""
        answer, effects = self.core.select_and_reserve(request, self._clock(), unknown=unknown)
        if effects is not NOTHING or self.keeper is not None:  # else there is nothing to do
            self._carry_out(effects)
        return answer

    def select_pair_now(self, request: SelectPairRequest, unknown: bytes = b"") -> Answer | Ticket:
        """POST /select_pair as far as it goes without waiting; a Ticket goes to `wait`."""
        answer, effects = self.core.select_pair(request, self._clock(), unknown=unknown)
        self._carry_out(effects)
        return answer

    async def select_batch(self, request: SelectBatchRequest, items: Sequence[Item]) -> WaveAnswer:
        """POST /select_batch; if the caller is cancelled, nothing stays booked.

        Args:
            request: what is wanted of the wave; its `requests` are not looked at.
            items: what is, each with the canonical bytes of members nobody knows; or why it cannot
                be read.

        Raises:
            ServiceError: as `Waves.begin`, and where all or none was asked for.
        """
        return await self._waves.run(self.core.select_batch(request, items))

    @cached_property
    def teller(self) -> Teller:
        """Who tells decisions."""
        transfer_cost = self.core.reader.config.kv_transfer_cost_per_block
        return Teller(self.core.decisions, self._clock, transfer_cost)

    async def select(self, request: SelectRequest) -> Answer:
        """POST /select, waiting while every eligible rank is busy; cancelling withdraws."""
        return await self._given(self.select_now, request)

    async def _given(self, verb: Callable[[S], Answer | Ticket], request: S) -> Answer:
        """Wait if need be, and tell the decision if that was asked for."""
        try:
            answer = verb(request)
            given = await self.wait(answer) if isinstance(answer, Ticket) else answer
        except ServiceError as error:
            await self.teller.finish_refusal(error)
            raise
        if not request.explain and given.decision is UNSET:
            return given
        return await self.teller.finish(given, request)

    async def select_and_reserve(
        self, request: SelectAndReserveRequest, unknown: bytes = b""
    ) -> Answer:
        """POST /select_and_reserve, waiting likewise; cancelling withdraws, nothing is booked."""
        verb = partial(self.select_and_reserve_now, unknown=unknown)
        return _legible(await self._given(verb, request))

    async def select_pair(self, request: SelectPairRequest, unknown: bytes = b"") -> Answer:
        """POST /select_pair, waiting likewise; cancelling withdraws, nothing is booked."""
        return await self._given(partial(self.select_pair_now, unknown=unknown), request)

    @property
    def waiting(self) -> int:
        """How many requests wait here for an answer."""
        return len(self._waiting)

    async def wait(self, ticket: Ticket) -> Answer:
        """Wait for a ticket's answer; if the caller is cancelled the ticket leaves the queue.

        Raises:
            ServiceError: the refusal that came instead.
        """
        if self._closing:
            self.core.withdraw(ticket)
            raise ShuttingDown
        if isinstance(ticket.answer, ServiceError):  # before anybody came to wait
            raise ticket.answer
        if ticket.answer is not None:
            return ticket.answer
        self._wake_at(ticket.deadline)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(ticket, []).append(future)
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up(ticket, future)
            raise

    def _give_up(self, ticket: Ticket, future: asyncio.Future[Answer]) -> None:
        """A caller is gone: nobody waits in its name, and nothing stays booked in its name."""
        futures = self._waiting.get(ticket)
        if futures is not None:
            futures.remove(future)
            if not futures:
                del self._waiting[ticket]
            self.core.withdraw(ticket)
            return
        ticket.holders -= 1  # the answer came in the turn in which its caller went
        booked = ticket.reservation_id is not None and isinstance(
            ticket.answer, Selection | PairSelection
        )
        if ticket.holders == 0 and booked:
            self.free(ticket.reservation_id or "")

    def _wake_at(self, at: float) -> None:
        """Wake up when the first of the waiting has waited too long; one timer for all.

        Deadlines that come by another policy are seen by housekeeping.
        """
        if self._deadline is not None:
            if self._deadline[0] <= at and not self._closing:
                return
            self._deadline[1].cancel()
            self._deadline = None
        if at != math.inf:
            delay = max(0.0, at - self._clock())
            loop = asyncio.get_running_loop()
            self._deadline = (at, loop.call_later(delay, self._refuse_late))

    def _refuse_late(self) -> None:
        self._deadline = None
        self._carry_out(self.core.refuse_late(self._clock()))
        self._wake_at(self.core.next_deadline())

    # -- reservations --------------------------------------------------------------------------

    def reserve(self, request: ReservationRequest, unknown: bytes = b"") -> ReservationAnswer:
        """POST /reservations."""
        answer, effects = self.core.reserve(request, self._clock(), unknown=unknown)
        self._carry_out(effects)
        return answer

    def prefill_complete(self, reservation_id: str, cached_tokens: int | None = None) -> None:
        """POST /reservations/{id}/prefill_complete."""
        effects = self.core.prefill_complete(reservation_id, self._clock(), cached_tokens)
        if effects is not NOTHING or self.keeper is not None:  # else there is nothing to do
            self._carry_out(effects)

    def output_block(self, reservation_id: str, decay_fraction: float | None = None) -> None:
        """POST /reservations/{id}/output_block."""
        self._carry_out(self.core.output_block(reservation_id, decay_fraction, self._clock()))

    def free(self, reservation_id: str) -> None:
        """DELETE /reservations/{id}."""
        effects = self.core.free(reservation_id, self._clock())
        if effects is not NOTHING or self.keeper is not None:  # as above
            self._carry_out(effects)

    def batch_now(self, request: BatchRequest) -> BatchAnswer | asyncio.Task[BatchAnswer]:
        """POST /reservations/batch as far as one slice goes; the task has the answer of more.

        Raises:
            InvalidField: too many operations; none was carried out.
        """
        self.core.check_batch(request)
        return self._batches.begin(request.operations)

    def _operate(self, operation: Operation) -> OperationResult:
        result, effects = self.core.operate(operation, self._clock())
        self._carry_out(effects)
        return result

    # -- leases --------------------------------------------------------------------------------

    def open_lease(self, request: LeaseRequest) -> LeaseRecord:
        """POST /leases."""
        record, effects = self.core.open_lease(request, self._clock())
        self._carry_out(effects)
        return record

    def renew_lease(self, lease_id: str, request: LeaseRenewal) -> LeaseRecord:
        """POST /leases/{id}/renew."""
        record, effects = self.core.renew_lease(lease_id, request, self._clock())
        self._carry_out(effects)
        return record

    def close_lease_now(self, lease_id: str) -> Lease | None:
        """DELETE /leases/{id} as far as one turn goes; a Lease goes to `clear_lease`."""
        lease, effects = self.core.close_lease(lease_id, self._clock())
        self._carry_out(effects)
        return lease if lease is not None and lease.reservations else None

    async def clear_lease(self, lease: Lease) -> None:
        """Free the rest of what an ended lease left; if the caller goes, housekeeping does it."""
        while lease.reservations:
            await asyncio.sleep(0)
            self._carry_out(self.core.clear_lease(lease, self._clock()))

    def leases(
        self, owner: str | None, limit: int, prefixes: tuple[str, ...] | None = None
    ) -> LeaseList:
        """GET /leases; of those alone whose ids begin so, if that is said."""
        return self.core.leases(self._clock(), owner, limit, prefixes)

    # -- admission -----------------------------------------------------------------------------

    def admission(self) -> AdmissionStatus:
        """GET /admission."""
        return self.core.admission()

    def change_admission(self, change: AdmissionChange) -> AdmissionStatus:
        """PUT /admission; housekeeping goes on with who waits."""
        status, effects = self.core.change_admission(change, self._clock())
        self._carry_out(effects)
        self._note_change("admission", msgspec.to_builtins(change))
        return status

    def busy_thresholds(self) -> BusyThresholds:
        """GET /busy_threshold."""
        return self.core.busy_thresholds()

    def change_threshold(self, change: BusyThresholdChange) -> BusyThreshold:
        """POST /busy_threshold."""
        answer, effects = self.core.change_threshold(change, self._clock())
        self._carry_out(effects)
        self._note_change("busy_threshold", msgspec.to_builtins(change))
        return answer

    def forget_threshold(self, model: str, tenant_id: str | None) -> BusyThreshold:
        """DELETE /busy_threshold."""
        answer, effects = self.core.forget_threshold(model, tenant_id, self._clock())
        self._carry_out(effects)
        gone: dict[str, object] = {"model": model, "tenant_id": tenant_id}
        self._note_change("busy_threshold_forgotten", gone)
        return answer

    def report(self, worker_id: int, metrics: WorkerMetrics) -> WorkerMetricsAnswer:
        """POST /workers/{id}/metrics."""
        answer, effects = self.core.report(worker_id, metrics, self._clock())
        self._carry_out(effects)
        return answer

    def _hear_load(self, worker_id: int, metrics: WorkerMetrics) -> None:
        with contextlib.suppress(WorkerNotFound):  # it has gone meanwhile
            self.report(worker_id, metrics)

    # -- inspection ----------------------------------------------------------------------------

    def loads(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[ScopeLoads]:
        """GET /loads."""
        return self.core.loads(model_name, tenant_id)

    def potential_loads(self, request: PotentialLoadsRequest) -> list[LoadRow]:
        """POST /potential_loads."""
        return self.core.potential_loads(request)

    def overlap_scores(self, request: OverlapScoresRequest) -> OverlapScores:
        """POST /overlap_scores."""
        return self.core.overlap_scores(request)

    def trust(self, model_name: str | None = None, tenant_id: str | None = None) -> TrustTable:
        """GET /trust, all at once."""
        return self.core.trust(model_name, tenant_id)

    def trust_seats(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[TrustSeat]:
        """GET /trust: whom to tell of, each in its turn by `trust_row`."""
        return self.core.trusting.seats(model_name, tenant_id)

    def trust_row(self, seat: TrustSeat) -> RankTrustRow:
        """GET /trust: one of them."""
        return self.core.trusting.row(*seat)

    async def shadow(
        self,
        model_name: str | None = None,
        tenant_id: str | None = None,
        limit: int = SHADOW_SCOPES_LISTED,
        tenants: frozenset[str] | None = None,
    ) -> ShadowStatus:
        """GET /shadow; others have their turn every so many scopes.

        Args:
            model_name: of this one alone.
            tenant_id: of this one alone.
            limit: scopes told singly.
            tenants: whose; None: all, and what it costs the process.
        """
        telling = ShadowTelling(self.core.shadowing, limit)
        for number, partition in enumerate(list(self.core.partitions.values()), 1):
            scope = partition.scope
            if (
                model_name in {None, scope.model_name}
                and tenant_id in {None, scope.tenant_id}
                and (tenants is None or scope.tenant_id in tenants)
            ):
                telling.add(scope, partition.shadow_tally)
            if not number % SHADOW_SLICE:
                await asyncio.sleep(0)
        return telling.status(self._clock(), with_cost=tenants is None)

    def dump(self, tenants: frozenset[str] | None = None) -> AsyncIterator[bytes]:
        """GET /dump as JSON in pieces.

        Args:
            tenants: whose indexes; None: all.

        Raises:
            TooManyDumps: as many as `--dumps-max` are under way.
        """
        return self.dumps.begin(tenants)

    # -- replicas ------------------------------------------------------------------------------

    def replica_plane(self) -> Replicas:
        """Return the replica plane: who is listened to, and the snapshot for others.

        Raises:
            ReplicaSyncDisabled: without `--replica-sync-port`.
        """
        if self.replicas is None:
            raise ReplicaSyncDisabled
        return self.replicas

    def register_peer(self, endpoint: str) -> bool:
        """POST /replica_sync/register_peer; False when it is listened to already."""
        is_new = self.replica_plane().register(endpoint)
        self.core.peer_endpoints.add(endpoint)
        self._carry_out(NOTHING)
        return is_new

    def deregister_peer(self, endpoint: str) -> None:
        """POST /replica_sync/deregister_peer."""
        self.replica_plane().deregister(endpoint)
        self.core.peer_endpoints.remove(endpoint)
        self._carry_out(NOTHING)

    def replica_status(self) -> list[ReplicaStatus]:
        """What is known of every other publisher."""
        return self.core.replica_status(self._clock())

    # -- effects -------------------------------------------------------------------------------

    def _carry_out(self, effects: Effects) -> None:
        if self.keeper is not None:
            self.keeper.journal.note()
        if effects is NOTHING or not effects:
            return
        if self._listeners is not None:
            for stream in effects.unlisten:
                self._listeners.stop(stream)
            for listen in effects.listen:
                self._listen(self._listeners, listen)
            for stream in effects.reread:
                self._listeners.look_at(stream)
        self._answer(effects)
        if self.replicas is not None:
            self.replicas.carry_out(effects)
        for placement, ticket in effects.decided:
            with contextlib.nullcontext() if self.tracing is None else self.tracing.about(ticket):
                _log.debug("Selected worker", extra=_decision_facts(placement) | _ids_of(ticket))
        for news in effects.trusted:
            _tell_trust(news)

    def _answer(self, effects: Effects) -> None:
        if effects.more:
            self._hurry.set()
        for ticket in effects.answered:
            for future in self._waiting.pop(ticket, ()):
                _resolve(future, ticket.answer)

    def _listen(self, listeners: Listeners, listen: Listen) -> None:
        if listen.stream.closed:  # a sibling's source was refused a moment ago
            return
        if self.recovery is not None and self.recovery.outcome == "running":
            self._held.append(listen)
            return
        warm = self.warm_start
        is_known = warm is not None and warm.knows(listen.stream)
        try:
            listeners.start(
                *(listen.stream, listen.endpoint, listen.replay_endpoint),
                is_held=is_known,
                server_key=listen.curve_key,
            )
        except EndpointRefused as error:
            self._refuse_source(listen.stream, error)
            return
        if warm is not None and is_known:
            warm.give_back(listen)

    def _record_message(
        self,
        stream: EventStream,
        frames: Sequence[bytes],
        is_replay: bool,  # noqa: FBT001 - as the listener tells it
    ) -> None:
        assert self.recording is not None
        index = self.core.registry.index(stream.scope)
        is_eagle = index is not None and index.is_eagle
        self.recording.hear(stream, frames, is_replay=is_replay, is_eagle=is_eagle)

    def _refuse_source(self, stream: EventStream, error: EndpointRefused) -> None:
        """Take a worker out of service whose events come from where nobody may connect to."""
        _log.warning("event source refused: %s (worker %d)", error, stream.rank.worker_id)
        self._carry_out(self.core.refuse_source(stream.rank, str(error), self._clock()))


def _differing(before: msgspec.Struct, after: msgspec.Struct) -> dict[str, object]:
    return {
        name: value
        for name in after.__struct_fields__
        if (value := getattr(after, name)) != getattr(before, name)
    }


def _tell_trust(news: TrustNews) -> None:
    facts = {
        "worker_id": news.rank.worker_id,
        "dp_rank": news.rank.dp_rank,
        "model_name": news.scope.model_name,
        "tenant_id": news.scope.tenant_id,
        "trust": round(news.trust, 4),
        "missing_share": round(news.missing_share, 4),
        "reasons": ",".join(news.reasons),
    }
    if news.reasons:
        _log.warning("a rank's index counts for less", extra=facts)
    else:
        _log.info("a rank's index counts in full again", extra=facts)


def _router_id(keeper: Keeper | None, rng: random.Random) -> int:
    return rng.getrandbits(64) | 1 if keeper is None else keeper.router_id


def _legible(answer: Answer) -> Answer:
    """Return an answer to a caller in this process, who wants numbers."""
    if not isinstance(answer, Selection):
        return answer
    shown: object = answer.sequence_hashes
    if not isinstance(shown, msgspec.Raw):
        return answer
    hashes = msgspec.json.decode(shown, type=list[int])
    return msgspec.structs.replace(answer, sequence_hashes=hashes)


def _resolve(future: asyncio.Future[Answer], answer: Answer | ServiceError | None) -> None:
    if future.done():
        return
    if answer is None or isinstance(answer, ServiceError):
        future.set_exception(answer or ShuttingDown())
    else:
        future.set_result(answer)


def _ids_of(ticket: Ticket) -> dict[str, str]:
    ids = {
        "selection_id": ticket.request.selection_id,
        "reservation_id": ticket.reservation_id,
    }
    return {name: value for name, value in ids.items() if value is not None}


def _decision_facts(placement: Placement) -> dict[str, Any]:
    """Return the fields of the reference's "Selected worker" line (contract 3.3)."""
    weights = placement.weights
    return {
        "worker_id": placement.worker.worker_id,
        "dp_rank": placement.dp_rank,
        "logit": placement.cost,
        "effective_cached_blocks": placement.device_blocks
        + weights.host_cache_hit_weight * placement.host_blocks
        + weights.disk_cache_hit_weight * placement.disk_blocks,
        "host_pinned_blocks": int(placement.host_blocks),
        "disk_blocks": int(placement.disk_blocks),
        "total_kv_blocks": placement.worker.spec.total_kv_blocks,
    }
