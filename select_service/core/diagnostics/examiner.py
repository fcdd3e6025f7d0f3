"""One examination of the whole fleet, in steps: the caller may pause after each.

Facts are read where they are kept; only the examiner's own memory changes. The neighbouring modules
(streams, prompts, fleet) name suspicions, and `suspicions.py` decides which have lasted long enough
to be reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from indexer.types import Scope, WorkerRank
from select_service.core.diagnostics import causes
from select_service.core.diagnostics.fleet_checks import (
    EndpointOwners,
    Habits,
    WallClock,
    copies_beyond_room,
    look_at_kernels,
    look_at_replicas,
    look_at_sources,
    look_at_worker,
    server_of,
)
from select_service.core.diagnostics.prompt_checks import Owner, PromptChecks
from select_service.core.diagnostics.rank_checks import RankChecks
from select_service.core.diagnostics.stream_checks import Look, StreamChecks
from select_service.core.diagnostics.suspicions import Suspicions
from select_service.types.doctor import Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from indexer.core.stream import EventStream
    from indexer.types import LinkState
    from select_service.core.admission.load_reports import LoadReports
    from select_service.core.counters import Counters, ReplicaCounters
    from select_service.core.diagnostics.causes import Cause
    from select_service.core.diagnostics.parity import Suspect
    from select_service.core.diagnostics.prompt_sample import PromptSampler
    from select_service.core.diagnostics.suspicions import FindingChange
    from select_service.core.fleet.catalog import Catalog
    from select_service.core.membership import Membership
    from select_service.core.routing.read import RequestReader
    from select_service.core.tenancy.shares import Shares
    from select_service.types import ReplicaStatus
    from select_service.types.doctor import DoctorLimits, PeerLink, Report, SourceLink


PAST_S: Final = 3600.0
"""What a stream has missed before it was listened to explains so long why prompts do not match."""


class Examiner:
    """Looks at everything once a round; remembers what one look cannot show.

    Attributes:
        rounds: Examinations that came to their end.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        membership: Membership,
        reader: RequestReader,
        sampler: PromptSampler,
        counters: Counters,
        replica_counters: ReplicaCounters,
        reports: LoadReports,
        replica_timeout_s: float,
        limits: DoctorLimits,
        now: float,
        shares: Shares | None = None,
    ) -> None:
        self._catalog = catalog
        self._membership = membership
        self._reader = reader
        self._sampler = sampler
        self._reports = reports
        self._limits = limits
        self._replica_timeout_s = replica_timeout_s
        self._habits = Habits(reader, counters, replica_counters, now)
        self._wall_clock = WallClock()
        self._prompts = PromptChecks(shares)
        self._ranks = RankChecks(shares)
        self._watches: dict[WorkerRank, StreamChecks] = {}
        self._stored: dict[Owner, int] = {}  # blocks reported by engines, as of the last round
        self._past_missing: set[Owner] = set()
        self.suspicions = Suspicions(limits.findings_max)
        self.rounds = 0
        self.changes: list[FindingChange] = []  # of the last round

    def round(
        self,
        now: float,
        wall_now: float,
        *,
        wall_ahead: float = 0.0,
        link_of: Callable[[EventStream], LinkState | None],
        peers: Sequence[PeerLink] = (),
        replicas: Sequence[ReplicaStatus] = (),
        sources: Sequence[SourceLink] = (),
        canaries: Sequence[Suspect] = (),
    ) -> Iterator[None]:
        """Examine the fleet; each step takes some ten microseconds.

        `wall_now` are seconds since 1970, to be compared with the engines'; `wall_ahead` is
        our wall clock less the machine's monotonic one.
        """
        self.suspicions.begin()
        yield from self._look_at_workers(now)
        yield from self._look_at_streams(now, wall_now, link_of)
        yield from self._look_at_estimates(now)
        yield from self._look_at_copies(now)
        yield from self._look_at_prompts(now)
        yield from self._look_at_ranks(now)
        yield from self._look_at_trust(now)
        yield from self._look_at_outliers(now)
        yield from self._look_at_reports(now)
        found = [*look_at_kernels(), *look_at_replicas(peers, replicas, self._replica_timeout_s)]
        found += look_at_sources(sources, self._limits.discovery_stale_s)
        found += canaries
        found += [*self._habits.look(now), *self._wall_clock.look(now, wall_ahead)]
        for cause, subject, what in found:
            self.suspicions.suspect(cause, subject, what, now)
        self.changes = yield from self.suspicions.conclude(now)
        self.rounds += 1

    def report(self, now: float) -> Report:
        """What the last round has found."""
        return self.suspicions.report(now)

    def _look_at_workers(self, now: float) -> Iterator[None]:
        for worker in [*self._catalog]:
            suspect = look_at_worker(worker)
            if suspect is not None:
                self.suspicions.suspect(*suspect, now)
            yield
        if not self._reader.schedulable:
            self.suspicions.suspect(causes.NO_WORKERS, Subject(), "no schedulable worker", now)

    # -- events ------------------------------------------------------------------------------------

    def _look_at_streams(
        self, now: float, wall_now: float, link_of: Callable[[EventStream], LinkState | None]
    ) -> Iterator[None]:
        endpoints = EndpointOwners()
        watches = self._watches
        seen: set[WorkerRank] = set()
        stored: dict[Owner, int] = {}
        past_missing: set[Owner] = set()
        for stream, endpoint, replay in self._membership.sources():
            if stream.closed:
                continue
            rank, scope = stream.rank, stream.scope
            drains = self._drains(rank.worker_id)  # it may end any time, and need not be reported
            suspect = _overlook if drains else self.suspicions.suspect
            for owner in (scope, (scope, rank)):
                stored[owner] = stored.get(owner, 0) + stream.tallies.blocks_stored
            link = link_of(stream)
            if link is not None:
                look = self._look(stream, link, replay, now, wall_now)
                watch = watches.get(rank)
                if watch is None or watch.stream is not stream:
                    watch = StreamChecks(stream, link.connections, look.requests, now)
                    watches[rank] = watch
                seen.add(rank)
                if stream.kv_state == "uncertain" and now - watch.known_since < PAST_S:
                    past_missing |= {scope, (scope, rank)}
                    look = look._replace(is_past_missing=True)
                subject = _subject(scope, rank, endpoint)
                for cause, what in watch.look(look):
                    is_ejected = cause is causes.EVENTS_UNREACHABLE and self._is_ejected(stream)
                    more = ", and it is passed over where others may be chosen"
                    suspect(cause, subject, what + more if is_ejected else what, now)
            server = self._server_of(rank)
            clash = None if drains else endpoints.name(rank, server, endpoint, replay)
            if clash is not None:
                subject = _subject(scope, rank, endpoint)
                self.suspicions.suspect(causes.ENDPOINT_SHARED, subject, clash, now)
            yield
        for rank in watches.keys() - seen:
            del watches[rank]
        self._stored, self._past_missing = stored, past_missing

    def _look(
        self,
        stream: EventStream,
        link: LinkState,
        replay: str | None,
        now: float,
        wall_now: float,
    ) -> Look:
        requests, holds = 0, True
        if stream.last_event_at is None:  # otherwise samples provide its prompts
            partition = self._membership.partitions[stream.scope]
            slot = partition.index.slot_of(stream.rank)
            if slot is not None and not self._only_decodes(stream.rank.worker_id):
                loads = partition.ledger.loads
                requests = int(loads.requests[slot]) if loads.decode[slot] else 0
            holds = partition.index.holds_anything(stream.rank)
        return Look(
            link,
            replay,
            requests,
            holds_anything=holds,
            is_past_missing=False,
            now=now,
            wall_now=wall_now,
        )

    def _only_decodes(self, worker_id: int) -> bool:
        """Whether what a worker caches comes from others, which report it."""
        worker = self._catalog.find(worker_id)
        return worker is not None and worker.spec.role == "decode"

    def _is_ejected(self, stream: EventStream) -> bool:
        partition = self._membership.partitions[stream.scope]
        return partition.fleet_slots.slot_of(stream.rank) in partition.outliers.ejected

    def _drains(self, worker_id: int) -> bool:
        worker = self._catalog.find(worker_id)
        return worker is not None and worker.drain is not None

    def _server_of(self, rank: WorkerRank) -> str | None:
        worker = self._catalog.find(rank.worker_id)
        return None if worker is None else server_of(worker.spec.endpoint or "")

    def _look_at_estimates(self, now: float) -> Iterator[None]:
        """Tell of each scope with workers that send no events, and not of events that are missing.

        What keeps those away has findings of its own.
        """
        for scope, partition in [*self._membership.partitions.items()]:
            workers = partition.fleet_slots.present.values() if partition.estimate.in_force else ()
            estimated = [one for one in workers if one.kv_events == "predicted"]
            if estimated:
                what = f"{len(estimated)} of {len(workers)} workers send no KV events"
                subject = Subject(model_name=scope.model_name, tenant_id=scope.tenant_id)
                self.suspicions.suspect(causes.EVENTS_ESTIMATED, subject, what, now)
            yield

    def _look_at_copies(self, now: float) -> Iterator[None]:
        """Name ranks whose engine seems to announce again what it holds."""
        for stream in self._membership.streams():
            rank = stream.rank
            worker = self._catalog.find(rank.worker_id)
            if worker is not None and not stream.reports_in_full and not stream.closed:
                index = self._membership.partitions[stream.scope].index
                copies = copies_beyond_room(index, rank, worker.spec.total_kv_blocks)
                if copies is not None:
                    subject = _subject(stream.scope, rank)
                    self.suspicions.suspect(causes.BLOCKS_COUNTED_TWICE, subject, copies, now)
            yield

    # -- prompts -----------------------------------------------------------------------------------

    def _look_at_prompts(self, now: float) -> Iterator[None]:
        for sample in self._sampler.drain(self._limits.samples_max):
            partition = self._membership.partitions.get(sample.scope)
            if partition is not None and not self._only_decodes(sample.worker_id):
                watch = self._watches.get(WorkerRank(sample.worker_id, sample.dp_rank))
                if watch is not None and sample.new_blocks:
                    watch.asked(sample.at, sample.end)
                self._prompts.judge(sample, partition.index, self._stored)
                worker = partition.fleet_slots.workers.get(sample.worker_id)
                if worker is not None and len(worker.slots) > 1:
                    self._ranks.judge(sample)
            yield
        for found in self._prompts.suspects(
            self._membership.registry.index, self._stored, self._past_missing.__contains__, now
        ):
            if found is not None:
                owner, cause, what = found
                subject = (
                    Subject(model_name=owner.model_name, tenant_id=owner.tenant_id)
                    if isinstance(owner, Scope)
                    else _subject(*owner)
                )
                self.suspicions.suspect(cause, subject, what, now)
            yield

    def _look_at_ranks(self, now: float) -> Iterator[None]:
        for found in self._ranks.suspects(self._membership.registry.index, now):
            if found is not None:
                owner, cause, what = found
                self.suspicions.suspect(cause, _subject(*owner), what, now)
            yield

    def _look_at_trust(self, now: float) -> Iterator[None]:
        """What engines say of their prompts is judged elsewhere; here it is reported."""
        for scope, partition in [*self._membership.partitions.items()]:
            for slot in partition.trust.distrusted():
                rank, at = partition.trust.find(slot), partition.index.rank_of(slot)
                if rank is not None and at is not None:
                    what = f"of the cached tokens expected, {rank.missing_share:.0%} were not there"
                    self.suspicions.suspect(causes.INDEX_UNTRUE, _subject(scope, at), what, now)
            yield

    def _look_at_outliers(self, now: float) -> Iterator[None]:
        """Ranks are passed over elsewhere, too; a lost publisher has its own finding."""
        for scope, partition in [*self._membership.partitions.items()]:
            for slot, one in partition.outliers.suspected().items():
                at = partition.index.rank_of(slot)
                if at is not None and one.reason == "failing":
                    what = f"{one.failures} of its reservations failed in a row"
                    self.suspicions.suspect(causes.RANK_FAILING, _subject(scope, at), what, now)
            yield

    def _look_at_reports(self, now: float) -> Iterator[None]:
        """Not needed where no policy goes by reported loads."""
        for worker_id, dp_rank, report in [*self._reports.stale()]:
            if report.stale_as == "unknown":
                continue  # it counts as loaded as it is booked
            worker = self._catalog.find(worker_id)
            partition = None if worker is None else self._membership.partitions.get(worker.scope)
            if worker is None or partition is None or partition.admission is None:
                continue
            what = f"it last reported its load {now - report.at:.0f} s ago"
            subject = _subject(worker.scope, WorkerRank(worker_id, dp_rank))
            self.suspicions.suspect(causes.REPORTS_STALE, subject, what, now)
            yield


def _overlook(_: Cause, __: Subject, ___: str, ____: float) -> None:
    """Suspect no rank."""


def _subject(scope: Scope, rank: WorkerRank, endpoint: str | None = None) -> Subject:
    subject = Subject(
        model_name=scope.model_name,
        tenant_id=scope.tenant_id,
        worker_id=rank.worker_id,
        dp_rank=rank.dp_rank,
    )
    return subject if endpoint is None else replace(subject, endpoint=endpoint)
