"""Worker records and their lifecycle: what was registered, and why it cannot be scheduled.

It keeps records and judges each on its own. `membership.py` decides what a record means together
with the rest of its scope (pinned block size, listeners, load).
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec import UNSET

from indexer.core.endpoint import check_endpoint
from indexer.errors import InvalidEndpoint
from indexer.types import Scope
from select_service.core.changes import WORKER
from select_service.core.fleet.replay_endpoints import replay_endpoints
from select_service.core.tenancy.shares import Shares
from select_service.errors import (
    InvalidField,
    InvalidRequest,
    NameRefused,
    TooManyWorkers,
    WorkerNotFound,
)
from select_service.types import WorkerPatch, WorkerRecord, WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from select_service.core.changes import Changes
    from select_service.types import CoreLimits, KvEvents, KvEventsDefault, KvRankState, Outlier

Lifecycle = Literal["incomplete", "schedulable", "draining", "unschedulable"]

NOT_NAMED: Final = "no longer named"
"""Why a worker takes no new work that its source does not list any more."""

_ATTACHED = frozenset({"schedulable", "draining"})
_U32_END = 1 << 32
_RECONCILIATION = "reconciliation failed: "


class Worker:
    """One registered worker: its record, derived values, and the slots it occupies."""

    __slots__ = (
        "drain",
        "kv_events",
        "lifecycle",
        "operator_drain",
        "ranks",
        "reasons",
        "scope",
        "slots",
        "source",
        "spec",
        "taints",
        "unready",
        "worker_id",
    )

    def __init__(
        self, spec: WorkerSpec, source: str = "api", kv_events_default: KvEventsDefault = "auto"
    ) -> None:
        self.spec = spec
        self.worker_id = spec.worker_id  # the catalog key
        self.source = source  # that registered it, and may change it
        self.kv_events = kv_events_of(spec, kv_events_default)
        tenant = spec.tenant_id if spec.tenant_id is not UNSET else spec.routing_group
        self.scope = Scope(spec.model_name, "default" if tenant is UNSET else tenant)
        start = spec.data_parallel_start_rank or 0
        size = 1 if spec.data_parallel_size is None else spec.data_parallel_size
        self.ranks = range(start, min(start + size, _U32_END))
        self.taints = frozenset(spec.taints)
        self.slots: dict[int, int] = {}  # dp_rank → slot while schedulable or draining
        self.lifecycle: Lifecycle = "incomplete"
        self.reasons: list[str] = []
        self.drain: str | None = None
        """Why it takes no more work; "": no reason given; None: it takes work.

        The first of the two that follow; `hold_back` sets all three."""
        self.operator_drain: str | None = None
        """Set by an operator for the id, and not part of the record: registering the worker again,
        as engines and sources do, leaves it unchanged."""
        self.unready: str | None = None
        """Why its source says that it takes no new work; ends when the source says otherwise."""

    def hold_back(self, operator: str | None, source: str | None) -> None:
        """Set why it takes no more work, for an operator and for its source; None: it does."""
        self.operator_drain, self.unready = operator, source
        self.drain = source if operator is None else operator

    @property
    def is_absent(self) -> bool:
        """Whether its source no longer names it: anybody may register it anew, or remove it."""
        return self.unready == NOT_NAMED

    @property
    def drain_reasons(self) -> list[str]:
        """Return what keeps it from taking more work, and why."""
        asked, source = self.operator_drain, self.unready
        reasons = [] if asked is None else [f"draining: {asked}" if asked else "draining"]
        return reasons if source is None else [*reasons, f"{self.source}: {source}"]

    @property
    def has_slot(self) -> bool:
        """Whether its ranks have load and an index; also true while it drains."""
        return self.lifecycle in _ATTACHED

    @property
    def reports_in_full(self) -> bool:
        """Whether its engine also publishes which blocks prompts find in its cache."""
        return self.spec.kv_cache_report_mode == "full"

    @property
    def event_sources(self) -> dict[int, str]:
        """Return dp_rank → KV-event endpoint; the map, if given, replaces the single one."""
        if self.kv_events != "engine":
            return {}
        if self.spec.kv_events_endpoints:
            return {int(rank): at for rank, at in self.spec.kv_events_endpoints.items()}
        if self.spec.kv_events_endpoint is not None and len(self.ranks) == 1:
            return {self.ranks.start: self.spec.kv_events_endpoint}
        return {}

    @property
    def replay_sources(self) -> dict[int, str]:
        """Return dp_rank → replay endpoint, for each event source that has one."""
        by_rank = {int(rank): at for rank, at in self.spec.replay_endpoints.items()}
        return replay_endpoints(self.event_sources, self.spec.replay_endpoint, by_rank)

    def record(
        self, kv_ranks: list[KvRankState] | None = None, outliers: list[Outlier] | None = None
    ) -> WorkerRecord:
        """Return the record as every worker route returns it."""
        shown = dict(zip(_SHOWN, _shown(self.spec), strict=True))
        for name in _SHOWN_IF_GIVEN:
            if shown[name] is None or shown[name] == {}:
                del shown[name]
        shown["tenant_id"] = self.scope.tenant_id
        shown["lifecycle"] = self.lifecycle
        shown["taints"] = sorted(self.taints)
        shown["source"] = self.source
        if self.reasons:
            shown["not_schedulable_reasons"] = self.reasons
        if kv_ranks:
            shown |= {"kv_state": "uncertain", "kv_ranks": kv_ranks}
        if outliers:
            shown["outliers"] = outliers
        return WorkerRecord(**shown)


def kv_events_of(spec: WorkerSpec, default: KvEventsDefault) -> KvEvents:
    """Return where the blocks of a worker are known from.

    Its record decides, and otherwise the default: "none" is for all workers, "predicted" for those
    without an endpoint of KV events. With "engine" these lack one, as in the contract, and with
    "auto" those of them that do not report how many blocks an estimate may hold.
    """
    if spec.kv_events is not None:
        return spec.kv_events
    if default == "none":
        return "none"
    has_endpoint = bool(spec.kv_events_endpoints) or spec.kv_events_endpoint is not None
    is_estimable = default == "predicted" or (default == "auto" and spec.total_kv_blocks)
    return "predicted" if is_estimable and not has_endpoint else "engine"


def missing_parts(worker: Worker) -> list[str]:
    """Return why the record alone cannot be scheduled, in the contract's order."""
    spec = worker.spec
    reasons = []
    if not spec.endpoint:
        reasons.append("endpoint is required")
    if not spec.block_size:
        reasons.append("block_size must be greater than 0")
    if spec.data_parallel_size == 0:
        reasons.append("data_parallel_size must be greater than 0")
    if worker.kv_events == "engine":
        sources = worker.event_sources
        reasons += [
            f"kv_events endpoint is required for dp_rank {rank}"
            for rank in worker.ranks
            if rank not in sources
        ]
    return reasons


def bad_sources(worker: Worker) -> list[str]:
    """Return the first event or replay endpoint that violates the grammar of `endpoint.py`."""
    replays = worker.replay_sources
    for rank, endpoint in sorted(worker.event_sources.items()):
        for kind, address in (("kv_events", endpoint), ("replay", replays.get(rank))):
            if address is None:
                continue
            try:
                check_endpoint(address)
            except InvalidEndpoint as error:
                where = f"worker {worker.worker_id} dp_rank {rank}"
                return [f"{_RECONCILIATION}invalid {kind} endpoint for {where}: {error}"]
    return []


def reconciliation_failed(why: str) -> str:
    """Return the reason why a well-formed record clashes with its surroundings."""
    return _RECONCILIATION + why


def worker_not_found(worker_id: int) -> WorkerNotFound:
    """Return the refusal of an id that does not exist, or that this caller may not see."""
    return WorkerNotFound(f"worker {worker_id} not found")


class Catalog:
    """All records by worker id."""

    def __init__(
        self,
        limits: CoreLimits,
        shares: Shares | None = None,
        *,
        kv_events_default: KvEventsDefault = "auto",
    ) -> None:
        self._kv_events_default: KvEventsDefault = kv_events_default
        self._workers: dict[int, Worker] = {}
        shares = shares or Shares(limits)
        self._tenants = shares.bound("workers_max", lambda: limits.workers_max)
        self._limits = limits
        self.too_parallel = 0  # records refused for their number of ranks
        self.too_long = 0  # refused for their length
        self.too_many = 0  # refused for the number of workers
        self.changes: Changes | None = None  # set if the state is kept on disk
        self.watchers: list[Callable[[Scope, int], None]] = []
        """Called when a record changes, with each scope that it was or is in."""

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        """Yield workers by ascending id."""
        return (self._workers[worker_id] for worker_id in sorted(self._workers))

    def ids(self) -> list[int]:
        """Return all worker ids, unsorted. O(workers), and fast."""
        return list(self._workers)

    def count(self, lifecycle: Lifecycle) -> int:
        """Return how many workers are in this lifecycle. O(workers), 40 ns each."""
        return [worker.lifecycle for worker in self._workers.values()].count(lifecycle)

    def models(self) -> set[str]:
        """Return the models of all workers, schedulable or not. O(workers), 80 ns each."""
        return {worker.spec.model_name for worker in self._workers.values()}

    def find(self, worker_id: int) -> Worker | None:
        """Return the worker, or None."""
        return self._workers.get(worker_id)

    def get(self, worker_id: int) -> Worker:
        """Return the worker.

        Raises:
            WorkerNotFound: the id is not in the catalog.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            raise worker_not_found(worker_id)
        return worker

    def put(self, worker: Worker) -> None:
        """Replace the whole record of its id."""
        before = self._workers.get(worker.worker_id)
        self._workers[worker.worker_id] = worker
        if before is None or before.scope.tenant_id != worker.scope.tenant_id:
            self._tenants.take(worker.scope.tenant_id)
            if before is not None:
                self._tenants.give(before.scope.tenant_id)
        for heed in self.watchers:
            heed(worker.scope, worker.worker_id)
            if before is not None and before.scope != worker.scope:
                heed(before.scope, worker.worker_id)
        if self.changes is not None:
            self.changes.mark(WORKER, str(worker.worker_id))

    def remove(self, worker_id: int) -> None:
        """Remove the record."""
        worker = self._workers.pop(worker_id)
        self._tenants.give(worker.scope.tenant_id)
        for heed in self.watchers:
            heed(worker.scope, worker_id)
        if self.changes is not None:
            self.changes.mark(WORKER, str(worker_id))

    def check_room(self, worker_id: int, tenant_id: str) -> None:
        """Check that a tenant may have another worker, or this one.

        Raises:
            TooManyWorkers: it is not the tenant's yet, and there are as many as there may be.
        """
        known = self._workers.get(worker_id)
        if known is None:
            has_room = self._tenants.has_room(tenant_id)
        else:
            has_room = self._tenants.may_move(known.scope.tenant_id, 1, tenant_id, 1)
        if not has_room:
            self.too_many += 1
            raise TooManyWorkers(self._limits.workers_max, self._tenants.refuse(tenant_id))

    def check(self) -> None:
        """Assert all invariants."""
        self._tenants.check(one.scope.tenant_id for one in self._workers.values())

    def admit(self, spec: WorkerSpec, source: str = "api") -> Worker:
        """Return a new worker that is not yet in the catalog.

        Raises:
            InvalidRequest: more ranks than `--data-parallel-size-max`, or an invalid rank key.
            InvalidField: a name or the record is too long.
        """
        limits = self._limits
        if (spec.data_parallel_size or 0) > limits.data_parallel_size_max:
            self.too_parallel += 1
            raise InvalidRequest(
                f"data_parallel_size must be at most {limits.data_parallel_size_max}",
                field="data_parallel_size",
            )
        for field in _NAMES:
            check_name(field, getattr(spec, field), limits.name_length_max)
        if len(_encode(spec)) > limits.worker_bytes_max:
            self.too_long += 1
            raise InvalidField(f"a worker's record must fit {limits.worker_bytes_max} bytes")
        _check_ranks("kv_events_endpoints", spec.kv_events_endpoints)
        _check_ranks("replay_endpoints", spec.replay_endpoints)
        return Worker(spec, source, self._kv_events_default)

    def patched(self, worker_id: int, patch: WorkerPatch) -> Worker:
        """Return a new worker: the record with the patch merged in.

        Raises:
            WorkerNotFound: the id is not in the catalog.
            InvalidRequest: as in `admit`.
        """
        old = self.get(worker_id).spec
        changes = {
            name: value for name in _PATCHABLE if (value := getattr(patch, name)) is not None
        }
        return self.admit(msgspec.structs.replace(old, **changes))


def _check_ranks(field: str, endpoints: Mapping[str, str]) -> None:
    ranks = set()
    for key in endpoints:
        is_number = key.isascii() and key.isdigit() and len(key) <= len(str(_U32_END))
        if not (is_number and int(key) < _U32_END):
            raise InvalidRequest(f"{field}: {key[:64]!r} is not a dp_rank", field=field)
        ranks.add(int(key))
    if len(ranks) != len(endpoints):
        raise InvalidRequest(f"{field} names a dp_rank twice", field=field)


def check_name(field: str, text: object, most: int) -> None:
    """Refuse a name that is too long or not printable; values other than text are ignored.

    Raises:
        NameRefused: the name is refused.
    """
    if isinstance(text, str) and (len(text) > most or not text.isprintable()):
        raise NameRefused.of(field, text, most, "name_length_max")


_encode = msgspec.msgpack.Encoder().encode
_NAMES = ("model_name", "tenant_id", "routing_group")
_SHOWN = tuple(
    field for field in WorkerRecord.__struct_fields__ if field in WorkerSpec.__struct_fields__
)
_SHOWN_IF_GIVEN = [
    field.name
    for field in msgspec.structs.fields(WorkerRecord)
    if field.name in _SHOWN and field.default is UNSET
]
_shown = attrgetter(*_SHOWN)
_PATCHABLE = tuple(
    name for name in WorkerPatch.__struct_fields__ if name not in ("worker_id", *_NAMES)
)
