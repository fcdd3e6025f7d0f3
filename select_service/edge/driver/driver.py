"""Reads the clock, calls the core, carries out its effects: the only caller of `core/service.py`.

HTTP and embedding both reach the core through this class. It inherits its operations, which are
grouped as in the core (`worker_operations.py`, `selection_operations.py` and so on). The parts that
run around the core (waiting requests, event sources, housekeeping) lie beside them. It decides
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections import Counter
from typing import TYPE_CHECKING

from indexer.core.registry import StreamRegistry
from indexer.edge.addresses import Addresses
from indexer.types import EventLossPolicy
from select_service.core.instrumentation.instrumented import CoreObservers
from select_service.core.service import ProcessLife, SelectionCore
from select_service.edge.batch_runner import BatchRunner
from select_service.edge.driver.admission_operations import AdmissionOperations
from select_service.edge.driver.core_calls import CallContext
from select_service.edge.driver.driver_options import DriverOptions, EdgeLimits
from select_service.edge.driver.effects_executor import EffectsExecutor
from select_service.edge.driver.health_operations import HealthOperations
from select_service.edge.driver.housekeeping import Housekeeping
from select_service.edge.driver.query_operations import QueryOperations
from select_service.edge.driver.replica_operations import ReplicaOperations
from select_service.edge.driver.reservation_operations import (
    LifecycleBatches,
    ReservationOperations,
)
from select_service.edge.driver.selection_operations import SelectionOperations
from select_service.edge.driver.sources import EventSources
from select_service.edge.driver.startup_recovery import StartupRecovery
from select_service.edge.driver.waiting_callers import WaitingCallers
from select_service.edge.driver.worker_operations import WorkerOperations
from select_service.edge.dump_stream import Dumps
from select_service.edge.load_topic import LoadTopic
from select_service.edge.readiness import REPLICA_LEDGERS, ReadinessGate
from select_service.types import RouterConfig
from select_service.types.admission import AdmissionSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    import msgspec

    from indexer.edge.recovery import Recovery
    from indexer.types import EgressSettings
    from select_service.core.instrumentation.recorder import Recorder
    from select_service.core.pricing.policy import PolicyBook, PolicyError
    from select_service.edge.discovery.followers import Discovery
    from select_service.edge.state.keeper import Keeper
    from select_service.edge.state.recording_file import Recording
    from select_service.edge.state.warm_start import WarmStart
    from select_service.edge.tracing.spans import Tracing
    from select_service.settings import Settings
    from select_service.types import CoreLimits, TrustSettings
    from select_service.types.shadow import ShadowSettings

_log = logging.getLogger("select_service")


class Driver(
    WorkerOperations,
    SelectionOperations,
    ReservationOperations,
    AdmissionOperations,
    QueryOperations,
    HealthOperations,
    ReplicaOperations,
):
    """One core, its clock and its sockets; callers wait only for a selection.

    Attributes:
        core: the state, and the operations that change it.
        turn: the core, clock and effects that every part shares.
        discovery: finds workers and replicas; set before `start`.
        sources: the workers' event streams.
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        *,
        limits: CoreLimits | None = None,
        edge_limits: EdgeLimits | None = None,
        options: DriverOptions | None = None,
        policies: PolicyBook | PolicyError | None = None,
        admission: AdmissionSettings | None = None,
        trust: TrustSettings | None = None,
        shadow: ShadowSettings | None = None,
        on_event_loss: EventLossPolicy = EventLossPolicy.KEEP,
        replica_sync_port: int | None = None,
        indexer_peers: Sequence[str] = (),
        egress: EgressSettings | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the core; `start` opens the sockets.

        Args:
            config: weights and switches.
            limits: bounds of the core.
            edge_limits: bounds of the parts around the core.
            options: optional parts (keeper, security, tracing, recording); `close` closes them.
            policies: the parsed policy file, or why it cannot be used.
            admission: which requests are admitted.
            trust: when an index counts for less.
            shadow: weights evaluated alongside without effect; None: none.
            on_event_loss: what becomes of a rank's blocks when lost events cannot be recovered.
            replica_sync_port: where bookings are published; None: nowhere.
            indexer_peers: base URLs of peers that may have an index to start with.
            egress: where connections may lead.
            seed: for ties and temperatures; None: from the system.
            clock: seconds; when it goes back, time stands still.

        Raises:
            ValueError: the settings of admission, trust or egress are inconsistent.
        """
        self._clock = clock = forwards_only(clock)
        self.instance_id = secrets.token_hex(8)  # of no other, and of no later start
        self.addresses = Addresses(egress, clock=clock)
        bounds, options = edge_limits or EdgeLimits(), options or DriverOptions()
        keeper = self.keeper = options.keeper
        self.security, self.tracing = options.security, options.tracing
        self.recording = options.recording
        self.credentials = None if self.security is None else self.security.credentials
        rng, recorder = _chance(seed, self.recording)
        self.core = SelectionCore(
            StreamRegistry(on_event_loss=on_event_loss, limits=bounds.streams),
            config or RouterConfig(),
            rng,
            policies=policies,
            limits=limits,
            admission=admission,
            trust=trust,
            life=_life(keeper, None if replica_sync_port is None else rng),
            watch=_watch(self.tracing, recorder),
        )
        self.core.trust_monitor.wall_ahead = time.time() - clock()  # noqa: TID251 - accurate to a day at best
        self.core.follow_shadow(shadow, clock())
        self.bookings = self.core.lifecycle.bookings
        self._limits = bounds
        self.dumps = Dumps(self.core, bounds.dumps, clock)
        self.discovery: Discovery | None = None
        self.readiness = ReadinessGate(bounds.ready_timeout_s, clock)
        self._prepare_recovery(indexer_peers)
        self._effects_executor = EffectsExecutor(keeper, self.tracing)
        self._carry_out = self._effects_executor.carry_out
        self.turn = turn = CallContext(self.core, clock, self._carry_out)
        self._waiting = self._effects_executor.waiting = WaitingCallers(turn, self.withdraw)
        self._batches = LifecycleBatches(self._operate, clock)
        self._batch_runner = BatchRunner(self._carry_out, clock)
        self._recorder = recorder
        self._changing = set()
        self.consistency_checks = Counter(consistent=0, different=0)
        self._prepare_replication(replica_sync_port)
        self._listen_to_workers(turn, admission or AdmissionSettings())
        self._housekeeping = Housekeeping(turn, self._effects_executor.hurry)

    def _prepare_recovery(self, indexer_peers: Sequence[str]) -> None:
        """Prepare to find what the index had before the start: at peers, on disk, at engines."""
        bounds = self._limits
        self._recovering = found = StartupRecovery(self.core, self.readiness, self._clock)
        found.ask_peers(indexer_peers, bounds.recovery, self.credentials, self.addresses)
        found.look_back(self.keeper, bounds.snapshot, self._is_fleet_known)
        found.ask_engines(bounds.ready_past_events_s, self._is_fleet_known)

    def _prepare_replication(self, port: int | None) -> None:
        """Let /ready wait for what other replicas have booked, if bookings are shared."""
        self._replica_sync_port = port
        if port is not None:
            self.readiness.wait_for(
                REPLICA_LEDGERS, lambda: self._is_fleet_known() and self.ledgers_applied()
            )

    def _listen_to_workers(self, turn: CallContext, admission: AdmissionSettings) -> None:
        """Prepare to receive what workers publish: KV events and load reports."""
        self.load_topic = LoadTopic(
            self.apply_published_load,
            bytes_max=admission.load_report_bytes_max,
            ranks_max=self.core.limits.data_parallel_size_max,
        )
        self.sources = self._effects_executor.sources = EventSources(
            turn,
            self._recovering,
            self.addresses,
            self.load_topic,
            limits=self._limits.streams,
            credentials=self.credentials,
            recording=self.recording,
        )

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
        await self._open_replication(http_port, advertise_url)
        if self.tracing is not None:
            self.tracing.start()
        self.readiness.start()
        self._recovering.start(self.sources.let_in)
        self._housekeeping.start()
        self._start_examining()
        if self.discovery is not None:
            self.discovery.start()

    async def _restore(self, keeper: Keeper) -> None:
        """Restore the state on disk, and record changes from now on."""
        dropped = await keeper.restore(self.core.state, self._carry_out, self._clock)
        changes = self.core.keep_changes()
        for key in dropped:
            changes.mark(*key)
        keeper.start(changes, self.take_back)

    def announce_leaving(self) -> None:
        """Become not ready; notify replicas now, so that they inherit our bookings in time."""
        self.readiness.is_leaving = True
        if self.replicas is not None:
            self.replicas.leave()

    async def close(self) -> None:
        """Dismiss waiting requests, stop timers, close sockets. Idempotent."""
        if self.discovery is not None:
            await self.discovery.close()
        self._waiting.close()
        self.load_topic.close()
        await self._batches.close()
        await self._batch_runner.close()
        await self._recovering.stop()
        await self._housekeeping.close()
        await self._stop_examining()
        await self._recovering.close()
        await self.sources.close()
        await self._close_replication()
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

    async def recover_from(self, peers: Sequence[str]) -> bool:
        """Fill the index from the first peer (base URL) that answers; False if none does."""
        return await self._recovering.recover_from(peers)

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
        self._carry_out(self.core.admission.reconfigure(core, admission, self._clock()))
        self.note_change("settings", {**core, **admission})

    def dump(
        self, tenants: frozenset[str] | None = None, charged_to: str | None = None
    ) -> AsyncIterator[bytes]:
        """GET /dump, as pieces of JSON; see `Dumps.begin`."""
        return self.dumps.begin(tenants, charged_to)

    # -- what other parts read -----------------------------------------------------------------

    def now(self) -> float:
        """Return the monotonic seconds that everything here uses."""
        return self._clock()

    @property
    def waiting(self) -> int:
        """How many requests wait here for an answer."""
        return len(self._waiting)

    @property
    def awaited(self) -> int:
        """Reservations booked here and still in flight, plus requests that wait for a worker."""
        return self.core.lifecycle.bookings.expected

    @property
    def recovery(self) -> Recovery | None:
        """The start-up recovery from a peer; None: no peers configured."""
        return self._recovering.recovery

    @property
    def warm_start(self) -> WarmStart | None:
        """The index snapshot on disk; None: there is none."""
        return self._recovering.warm_start

    @property
    def housekeeping_faults(self) -> int:
        """Housekeeping turns that raised, which is a bug."""
        return self._housekeeping.faults

    def _is_fleet_known(self) -> bool:
        return self.discovery is None or self.discovery.is_settled


def _chance(seed: int | None, recording: Recording | None) -> tuple[random.Random, Recorder | None]:
    """Return the random source, and its recorder if everything is recorded."""
    if recording is None:
        return random.Random(seed), None
    from select_service.core.instrumentation.recorder import Recorder  # only if recording

    return recording.random(seed), Recorder(recording)


def _life(keeper: Keeper | None, rng: random.Random | None) -> ProcessLife:
    """Return the identity of this run: the keeper's, or a new one if replicas need it."""
    first_decision = int(time.time() * 1e6)  # noqa: TID251 - above any earlier run's
    if keeper is not None:
        return ProcessLife(0 if rng is None else keeper.router_id, keeper.epoch, first_decision)
    return ProcessLife(0 if rng is None else rng.getrandbits(64) | 1, 1, first_decision)


def _watch(tracing: Tracing | None, recorder: Recorder | None) -> CoreObservers:
    return CoreObservers(
        None if tracing is None else tracing.recorder,
        recorder,
        stopwatch=time.perf_counter,
        trace_decisions=_log.isEnabledFor(logging.DEBUG),
    )


def _differing(before: msgspec.Struct, after: msgspec.Struct) -> dict[str, object]:
    return {
        name: value
        for name in after.__struct_fields__
        if (value := getattr(after, name)) != getattr(before, name)
    }


# A clock for the core, which requires that time never goes back. The system's monotonic clock meets
# that. A clock supplied by an embedding caller may be set back; time then stands still until it has
# caught up.


def forwards_only(clock: Callable[[], float]) -> Callable[[], float]:
    """Return a clock that never goes back: `time.monotonic` as it is, any other one wrapped."""
    if clock is time.monotonic:
        return clock
    latest = -math.inf

    def now() -> float:
        nonlocal latest
        latest = max(latest, clock())
        return latest

    return now
