"""Reads the clock, calls the core, carries out its effects: the only caller of `core/service.py`.

HTTP and embedding both reach the core through this file. The verbs are implemented in
`edge/verbs/`, grouped as in the core, and attached here; `edge/driver/` has what runs around the
core (waiting requests, event sources, housekeeping). This file decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING

from indexer.core.registry import Registry
from indexer.edge.addresses import Addresses
from indexer.types import EventLossPolicy
from select_service.core.instrumentation.instrumented import Watch
from select_service.core.service import Life, SelectionCore
from select_service.edge.clocks import forwards_only
from select_service.edge.driver.call_context import CallContext
from select_service.edge.driver.driver_options import DriverOptions, EdgeLimits
from select_service.edge.driver.effects_executor import EffectsExecutor
from select_service.edge.driver.health import Health
from select_service.edge.driver.housekeeping import Housekeeping
from select_service.edge.driver.sources import EventSources
from select_service.edge.driver.startup_recovery import StartupRecovery
from select_service.edge.driver.waiting_callers import WaitingCallers
from select_service.edge.dump_stream import Dumps
from select_service.edge.load_topic import LoadTopic
from select_service.edge.readiness import Readiness
from select_service.edge.verbs.inspecting import Inspecting
from select_service.edge.verbs.operating import Operating
from select_service.edge.verbs.registering import Registering
from select_service.edge.verbs.replicating import Replicating
from select_service.edge.verbs.reserving import Reserving
from select_service.edge.verbs.selecting import Selecting
from select_service.types import RouterConfig
from select_service.types.admission import AdmissionSettings
from select_service.types.doctor import DoctorLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import msgspec

    from indexer.edge.recovery import Recovery
    from indexer.types import EgressSettings
    from select_service.core.instrumentation.recorder import Recorder
    from select_service.core.pricing.policy import PolicyBook, PolicyError
    from select_service.edge.decision_report import DecisionReporter
    from select_service.edge.discovery.followers import Discovery
    from select_service.edge.doctor import Doctor
    from select_service.edge.replication.plane import Replicas
    from select_service.edge.state.keeper import Keeper
    from select_service.edge.state.recording_file import Recording
    from select_service.edge.state.warm_start import WarmStart
    from select_service.edge.tracing.spans import Tracing
    from select_service.settings import Settings
    from select_service.types import CoreLimits, TrustSettings
    from select_service.types.shadow import ShadowSettings

_log = logging.getLogger("select_service")


class Driver:
    """One core, its clock and its sockets; callers wait only for a selection.

    Attributes:
        core: the state, and the verbs that change it.
        turn: the core, clock and effects that every verb shares.
        discovery: finds workers and replicas; set before `start`.
        sources: the workers' event streams.
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        *,
        limits: CoreLimits | None = None,
        edge_limits: EdgeLimits | None = None,
        companions: DriverOptions | None = None,
        policies: PolicyBook | PolicyError | None = None,
        admission: AdmissionSettings | None = None,
        trust: TrustSettings | None = None,
        shadow: ShadowSettings | None = None,
        on_event_loss: EventLossPolicy = EventLossPolicy.KEEP,
        replica_sync_port: int | None = None,
        indexer_peers: Sequence[str] = (),
        reach: EgressSettings | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the core; `start` opens the sockets.

        Args:
            config: weights and switches.
            limits: bounds of the core.
            edge_limits: bounds of the parts around the core.
            companions: optional parts (keeper, security, tracing, recording); `close` closes them.
            policies: the parsed policy file, or why it cannot be used.
            admission: who is admitted at all.
            trust: when an index counts for less.
            shadow: weights evaluated alongside without effect; None: none.
            on_event_loss: what becomes of a rank's blocks when lost events cannot be recovered.
            replica_sync_port: where bookings are published; None: nowhere.
            indexer_peers: base URLs of peers that may have an index to start with.
            reach: where connections may lead.
            seed: for ties and temperatures; None: from the system.
            clock: seconds; when it goes back, time stands still.

        Raises:
            ValueError: the settings of admission, trust or reach are inconsistent.
        """
        self._clock = clock = forwards_only(clock)
        self.addresses = Addresses(reach, clock=clock)
        bounds, beside = edge_limits or EdgeLimits(), companions or DriverOptions()
        keeper = self.keeper = beside.keeper
        self.security, self.tracing = beside.security, beside.tracing
        self.recording = beside.recording
        self.credentials = None if self.security is None else self.security.credentials
        rng, witness = _chance(seed, self.recording)
        self.core = SelectionCore(
            Registry(on_event_loss=on_event_loss, limits=bounds.streams),
            config or RouterConfig(),
            rng,
            policies=policies,
            limits=limits,
            admission=admission,
            trust=trust,
            life=_life(keeper, None if replica_sync_port is None else rng),
            watch=_watch(self.tracing, witness),
        )
        self.core.trusting.wall_ahead = time.time() - clock()  # noqa: TID251 - accurate to a day at best
        self.core.follow_shadow(shadow, clock())
        self._limits = bounds
        self.dumps = Dumps(self.core, bounds.dumps, clock)
        self.discovery: Discovery | None = None
        self.readiness = Readiness(bounds.ready_timeout_s, clock)
        self._recovering = StartupRecovery(self.core, self.readiness, clock)
        self._recovering.ask_peers(indexer_peers, bounds.recovery, self.credentials, self.addresses)
        self._recovering.look_back(keeper, bounds.snapshot, self._is_fleet_known)
        self._carrier = EffectsExecutor(keeper, self.tracing)
        self._carry_out = self._carrier.carry_out
        self.turn = turn = CallContext(self.core, clock, self._carry_out)
        self._hang_verbs(turn, witness, replica_sync_port)
        self._replicating.hold(self.readiness, self._is_fleet_known)
        self._listen_to_workers(turn, admission or AdmissionSettings())
        self._housekeeping = Housekeeping(turn, self._carrier.hurry)
        self._hang_health(turn, bounds.doctor)

    def _hang_verbs(  # noqa: PLR0915 - one line per verb
        self, turn: CallContext, witness: Recorder | None, replica_port: int | None
    ) -> None:
        """Attach every verb as an attribute, where the HTTP handlers look for it."""
        registering = Registering(turn)
        self.upsert_worker = registering.upsert_worker
        self.patch_worker = registering.patch_worker
        self.delete_worker = registering.delete_worker
        self.drain_worker = registering.drain_worker
        self.undrain_worker = registering.undrain_worker
        self.hold_worker_back = registering.hold_worker_back
        self.drain_status = registering.drain_status
        self.scale_down_candidates = registering.scale_down_candidates
        self.workers = registering.workers
        self.worker_ids = registering.worker_ids
        self.worker_record = registering.worker_record
        is_kept = self.keeper is not None
        reserving = self._reserving = Reserving(turn, is_kept=is_kept)
        self.reserve = reserving.reserve
        self.prefill_complete = reserving.prefill_complete
        self.output_block = reserving.output_block
        self.free = reserving.free
        self.batch_now = reserving.batch_now
        self.open_lease = reserving.open_lease
        self.renew_lease = reserving.renew_lease
        self.close_lease_now = reserving.close_lease_now
        self.clear_lease = reserving.clear_lease
        self.leases = reserving.leases
        waiting = self._waiting = self._carrier.waiting = WaitingCallers(turn, reserving.free)
        self.wait = waiting.wait
        selecting = self._selecting = Selecting(turn, waiting.wait, is_kept=is_kept)
        self.select = selecting.select
        self.select_now = selecting.select_now
        self.select_and_reserve = selecting.select_and_reserve
        self.select_and_reserve_now = selecting.select_and_reserve_now
        self.select_pair = selecting.select_pair
        self.select_pair_now = selecting.select_pair_now
        self.select_batch = selecting.select_batch
        self.answer_doors = selecting.answer_doors
        operating = self._operating = Operating(turn, witness)
        self.admission = operating.admission
        self.admission_in_slices = operating.admission_in_slices
        self.change_admission = operating.change_admission
        self.change_admission_in_slices = operating.change_admission_in_slices
        self.busy_thresholds = operating.busy_thresholds
        self.busy_thresholds_in_slices = operating.busy_thresholds_in_slices
        self.change_threshold = operating.change_threshold
        self.forget_threshold = operating.forget_threshold
        self.report = operating.report
        inspecting = Inspecting(turn)
        self.loads = inspecting.loads
        self.load_scopes = inspecting.load_scopes
        self.load_of = inspecting.load_of
        self.potential_loads = inspecting.potential_loads
        self.overlap_scores = inspecting.overlap_scores
        self.trust = inspecting.trust
        self.trust_seats = inspecting.trust_seats
        self.trust_row = inspecting.trust_row
        self.shadow = inspecting.shadow
        self.consistency = inspecting.consistency
        self.consistency_checks = inspecting.checks
        self.dump = self.dumps.begin
        replicating = self._replicating = Replicating(
            *(turn, self._carrier, replica_port, self._limits.replicas)
        )
        self.replica_plane = replicating.plane
        self.register_peer = replicating.register_peer
        self.deregister_peer = replicating.deregister_peer
        self.replica_status = replicating.status

    def _listen_to_workers(self, turn: CallContext, admission: AdmissionSettings) -> None:
        """Prepare to receive what workers publish: KV events and load reports."""
        self.load_topic = LoadTopic(
            self._operating.hear_load,
            bytes_max=admission.load_report_bytes_max,
            ranks_max=self.core.limits.data_parallel_size_max,
        )
        self.sources = self._carrier.sources = EventSources(
            *(turn, self._recovering, self.addresses, self.load_topic),
            limits=self._limits.streams,
            credentials=self.credentials,
            recording=self.recording,
        )

    def _hang_health(self, turn: CallContext, limits: DoctorLimits) -> None:
        health = self._health = Health(
            *(turn, self._carrier, self.readiness, self.keeper, limits),
            lambda: [] if self.discovery is None else self.discovery.links(),
        )
        self.ready = health.ready
        self.is_ready = health.is_ready
        self.ready_for_traffic = health.ready_for_traffic
        self.ready_verbose = health.ready_verbose
        self.doctor = health.doctor

    # -- lifecycle -----------------------------------------------------------------------------

    async def start(self, http_port: int = 0, advertise_url: str | None = None) -> None:
        """Open sockets and timers on the running loop.

        Args:
            http_port: where replicas fetch our snapshot, on the host they listen to.
            advertise_url: where they fetch it instead, if given.

        Raises:
            indexer.errors.EndpointRefused: the replica port cannot be bound.
            StateDirUnusable: this build cannot read the state directory.
        """
        listeners = self.sources.open()
        if self.recording is not None:
            self.recording.start(self._clock)
        await self._recovering.open(listeners)
        if self.keeper is not None:
            await self._restore(self.keeper)
        await self._replicating.open(self.addresses, self.credentials, http_port, advertise_url)
        if self.tracing is not None:
            self.tracing.start()
        self.readiness.start()
        self._recovering.start(self.sources.let_in)
        self._housekeeping.start()
        self._health.start()
        if self.discovery is not None:
            self.discovery.start()

    async def _restore(self, keeper: Keeper) -> None:
        """Restore the state on disk, and record changes from now on."""
        dropped = await keeper.restore(self.core.state, self._carry_out, self._clock)
        changes = self.core.keep_changes()
        for key in dropped:
            changes.mark(*key)
        keeper.start(changes, self._reserving.take_back)

    def announce_leaving(self) -> None:
        """Become not ready; tell replicas now, so that they inherit our bookings in time."""
        self.readiness.is_leaving = True
        self._replicating.leave()

    async def close(self) -> None:
        """Dismiss waiting requests, stop timers, close sockets. Idempotent."""
        if self.discovery is not None:
            await self.discovery.close()
        self._waiting.close()
        self.load_topic.close()
        await self._reserving.close()
        await self._selecting.close()
        await self._recovering.stop()
        await self._housekeeping.close()
        await self._health.close()
        await self._recovering.close()
        await self.sources.close()
        await self._replicating.close()
        self.addresses.close()
        if self.keeper is not None:
            await self.keeper.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        if self.recording is not None:
            await self.recording.close()

    async def settle(self) -> None:
        """Wait until all changes may be acknowledged (for embedding; HTTP has its own way).

        Raises:
            ServiceError: the disk refuses the write.
        """
        if self.keeper is not None and (written := self.keeper.settled()) is not None:
            await written

    async def recovered(self, timeout_s: float) -> bool:
        """Wait for the end of index recovery, successful or not; False on timeout."""
        return await self._recovering.finished(timeout_s)

    def reconfigure(self, old: Settings, new: Settings) -> None:
        """Apply new settings at once; `config_reload.py` has validated them."""
        for limits, before, after in (
            (self.core.registry.limits, old.stream_limits, new.stream_limits),
            (self._limits.replicas, old.replica_limits, new.replica_limits),
            (self._limits.dumps, old.dump_limits, new.dump_limits),
        ):
            for name, value in _differing(before, after).items():
                setattr(limits, name, value)
        if old.stream_limits != new.stream_limits:
            self.sources.look_again()
        if old.shadow != new.shadow:
            self.core.follow_shadow(new.shadow, self._clock())
        core = _differing(old.core_limits, new.core_limits)
        admission = _differing(old.admission, new.admission)
        self._carry_out(self.core.reconfigure(core, admission, self._clock()))
        self._operating.note_change("settings", {**core, **admission})

    # -- what other parts read -----------------------------------------------------------------

    def now(self) -> float:
        """Return the monotonic seconds that everything here uses."""
        return self._clock()

    @property
    def teller(self) -> DecisionReporter:
        """The reader of recorded decisions."""
        return self._selecting.teller

    @property
    def waiting(self) -> int:
        """How many requests wait here for an answer."""
        return len(self._waiting)

    @property
    def awaited(self) -> int:
        """Reservations booked here and still in flight, plus requests that wait for a worker."""
        return self.core.desk.bookings.expected

    @property
    def replicas(self) -> Replicas | None:
        """The replica plane, while there is one."""
        return self._carrier.replicas

    @property
    def recovery(self) -> Recovery | None:
        """The start-up recovery from a peer; None: no peers configured."""
        return self._recovering.recovery

    @property
    def warm_start(self) -> WarmStart | None:
        """The index snapshot on disk; None: there is none."""
        return self._recovering.warm_start

    @property
    def diagnosed(self) -> Doctor | None:
        """The doctor, once something has needed it."""
        return self._health.diagnosed

    @property
    def event_handshakes_failed(self) -> Mapping[str, int]:
        """Failed handshakes with workers, by kind of failure."""
        return self.sources.handshakes_failed

    @property
    def housekeeping_faults(self) -> int:
        """Housekeeping turns that raised, which is a bug."""
        return self._housekeeping.faults

    def _is_fleet_known(self) -> bool:
        return self.discovery is None or self.discovery.is_settled


def _chance(seed: int | None, recording: Recording | None) -> tuple[random.Random, Recorder | None]:
    """Return the random source, and its witness if everything is recorded."""
    if recording is None:
        return random.Random(seed), None
    from select_service.core.instrumentation.recorder import Recorder  # only if recording

    return recording.random(seed), Recorder(recording)


def _life(keeper: Keeper | None, rng: random.Random | None) -> Life:
    """Return the identity of this run: the keeper's, or a new one if replicas need it."""
    first_decision = int(time.time() * 1e6)  # noqa: TID251 - above any earlier run's
    if keeper is not None:
        return Life(0 if rng is None else keeper.router_id, keeper.epoch, first_decision)
    return Life(0 if rng is None else rng.getrandbits(64) | 1, 1, first_decision)


def _watch(tracing: Tracing | None, witness: Recorder | None) -> Watch:
    return Watch(
        None if tracing is None else tracing.recorder,
        witness,
        stopwatch=time.perf_counter,
        trace_decisions=_log.isEnabledFor(logging.DEBUG),
    )


def _differing(before: msgspec.Struct, after: msgspec.Struct) -> dict[str, object]:
    return {
        name: value
        for name in after.__struct_fields__
        if (value := getattr(after, name)) != getattr(before, name)
    }
