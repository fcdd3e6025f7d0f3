"""Admission of the whole process: the policy in force, the thresholds, the scopes with a gate.

A partition gets a `PartitionAdmission` when there is something to judge, and keeps it; with all
defaults there is none, and nothing is checked. Operators' changes apply at once, and
survive the process if there is a state directory (`state.py`).
"""

from __future__ import annotations

from collections import Counter
from math import ulp
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from select_service.core.admission.load_reports import LoadReports
from select_service.core.admission.partition_admission import PartitionAdmission
from select_service.core.admission.policies import NAMES, build
from select_service.core.admission.policy_api import AdmissionRequest
from select_service.core.admission.retry_after import RetryPromises
from select_service.core.admission.thresholds import (
    FIELDS,
    NOTHING,
    ThresholdBook,
    read_thresholds,
)
from select_service.core.admission.totals import Totals
from select_service.core.admission.waiting_deadline import known_wait_s
from select_service.core.changes import ADMISSION, THRESHOLD
from select_service.core.fleet.catalog import check_name
from select_service.errors import (
    AdmissionControlOff,
    AdmissionRefused,
    InvalidField,
    InvalidRequest,
    ModelNotFound,
)
from select_service.types import CoreLimits
from select_service.types.admission import (
    BusyThreshold,
    BusyThresholds,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from indexer.types import Scope
    from select_service.core.admission.classes import SloClasses
    from select_service.core.admission.gate import AdmissionDecision
    from select_service.core.admission.policies import Built
    from select_service.core.admission.queue import Ticket
    from select_service.core.admission.thresholds import Thresholds
    from select_service.core.changes import Changes
    from select_service.core.columns import Rows
    from select_service.core.fleet.catalog import Catalog, Worker
    from select_service.core.partition import Partition
    from select_service.core.tenancy.shares import Shares
    from select_service.types import SelectRequest
    from select_service.types.admission import (
        AdmissionChange,
        AdmissionSettings,
        BusyThresholdChange,
    )

POLICY: Final = "policy"
"""The only key of its kind on disk."""
OFF: Final = "always-admit"
DEADLINE_S: Final = 30.0
"""How long a request waits for a full worker, unless `--queue-deadline-s` is set, while nothing is
known of how long that takes: about as long as clients commonly wait for a first token."""
_PROCESS_WIDE: Final = frozenset({"token-bucket"})
"""Policies with one allowance for all scopes."""


class AdmissionController:
    """Holds the admission settings, applies operators' changes, and opens gates."""

    def __init__(
        self,
        settings: AdmissionSettings,
        catalog: Catalog,
        partitions: Mapping[Scope, Partition],
        limits: CoreLimits | None = None,
        shares: Shares | None = None,
    ) -> None:
        """Read the settings.

        Raises:
            ValueError: the policy's configuration, a threshold or a class makes no sense.
        """
        self.settings = settings
        self._limits = limits or CoreLimits()
        self.changes: Changes | None = None  # set if the state is kept on disk
        self.clamped = 0
        """Requests that claimed a more important class than `--slo-class-max`."""
        self.totals = Totals(settings.tenant_labels_max)
        self._gates: Counter[str] = Counter()  # open gates by model
        self.thresholds = ThresholdBook(self._usual_thresholds())
        self.reports = LoadReports(catalog, partitions)
        self._catalog = catalog
        self._partitions = partitions
        self._shared: Built[Ticket] | None = None
        self._returns = RetryPromises(1, counts=self.totals.promises, shares=shares)
        self._shared_returns: RetryPromises | None = None
        self.policy, self.config = OFF, dict[str, object]()
        self.classes: SloClasses
        self.put_in_force(settings.policy, settings.policy_config)
        check_admission(settings)

    def _usual_thresholds(self) -> Thresholds:
        given = read_thresholds({field: getattr(self.settings, field) for field in FIELDS})
        return given if self.is_on else NOTHING

    def follow_settings(self, now: float) -> list[Partition]:
        """Apply changed settings to every gate, and open gates that are now needed.

        Returns:
            The partitions in which waiting requests may be admitted now.
        """
        self.thresholds.defaults = self._usual_thresholds()
        for partition in self._partitions.values():
            admission = partition.admission
            if admission is None:
                if self._wants_gate(partition):
                    self._open(partition)
                continue
            for worker in partition.fleet_slots.workers.values():
                admission.attach(worker)
                self.reports.replay(worker, admission)
            admission.set_thresholds(self._thresholds_of(partition))
            admission.refresh(now)
        return [one for one in self._partitions.values() if one.admission is not None]

    @property
    def is_on(self) -> bool:
        """Whether busy thresholds are in force at all."""
        return self.settings.mode == "token-capacity"

    def put_in_force(self, name: str, config: Mapping[str, object]) -> None:
        """Put a policy in force; gates follow with `apply`.

        Raises:
            ValueError: it makes no sense.
        """
        built: Built[Ticket] = build(name, config)
        self.policy, self.config, self.classes = built.name, built.config, built.classes
        self._shared = built if name in _PROCESS_WIDE else None
        self._returns.begin(
            len(built.classes.bands),
            slots_max=self.settings.return_slots_max,
            horizon_s=self.settings.return_horizon_s,
        )
        self._shared_returns = None if self._shared is None else self._returns

    def _build(self) -> Built[Ticket]:
        return self._shared or build(self.policy, self.config)

    # -- gates ---------------------------------------------------------------------------------

    def follow(self, worker: Worker) -> Partition | None:
        """Note a worker that came or changed: open its scope's gate if there is reason to now.

        Returns:
            Its partition, if that has a gate.
        """
        self.reports.declared(worker)
        partition = self._partitions.get(worker.scope)
        if partition is None:
            return None
        if partition.admission is None and (
            self._wants_gate(partition) or (worker.spec.max_inflight is not None and worker.slots)
        ):
            self._open(partition)
        if partition.admission is None:
            return None
        self.reports.replay(worker, partition.admission)
        return partition

    def _wants_gate(self, partition: Partition) -> bool:
        return (
            self.policy != OFF
            or bool(self.config)
            or self.settings.max_inflight is not None
            or self._thresholds_of(partition).any
        )

    def _thresholds_of(self, partition: Partition) -> Thresholds:
        return self.thresholds.of(*partition.scope) if self.is_on else NOTHING

    def _open(self, partition: Partition) -> None:
        partition.open_gate(
            PartitionAdmission(
                partition.ledger,
                self._build(),
                self.settings,
                self._thresholds_of(partition),
                self._shared_returns,
                partition.drainage.meter,
                totals=self.totals,
                tenant_id=partition.scope.tenant_id,
            )
        )
        self._gates[partition.scope.model_name] += 1
        admission = partition.admission
        assert admission is not None
        for worker in partition.fleet_slots.workers.values():
            self.reports.replay(worker, admission)

    def keepers(self) -> list[PartitionAdmission]:
        """Return the keepers of all scopes, with or without workers. O(partitions)."""
        return [one.admission for one in self._partitions.values() if one.admission is not None]

    def left(self, partition: Partition) -> None:
        """Keep the counts of the gate of a removed scope. O(1)."""
        admission, model = partition.admission, partition.scope.model_name
        if admission is None:
            return
        self._gates[model] -= 1
        is_last = not self._gates[model]
        if is_last:
            del self._gates[model]
        admission.close()
        self.totals.left_by_gate(admission.gate, admission.rejections, model, is_last=is_last)

    # -- asking --------------------------------------------------------------------------------

    def ask(self, ticket: Ticket) -> AdmissionRequest:
        """Return the request as a gate sees it.

        Raises:
            InvalidField: `priority` and `slo_class` disagree, or a target is none.
        """
        request = ticket.request
        name = request.slo_class
        if request.priority is not None or self.settings.slo_class_max is not None:
            name = self.class_of(request)
        target_ms, tenant = request.slo_ttft_ms, request.fairness_id
        if tenant is not None:
            self.check_fairness_id(tenant)
        return AdmissionRequest(
            ticket.prompt.isl_tokens,
            # the class it counts under for good
            self.classes.known(name) if name else self.classes.usual,
            ticket.partition.scope.tenant_id if tenant is None else tenant,
            -1,
            request.expected_output_tokens or 0,
            _FOREVER if target_ms is None else _seconds(target_ms),
        )

    def check_fairness_id(self, name: str) -> None:
        """Refuse a fairness id that queues and tallies should not store.

        Raises:
            NameRefused: it is too long or cannot be printed.
        """
        check_name("fairness_id", name, self._limits.name_length_max)

    def class_of(self, request: SelectRequest) -> str:
        """Return the class of a request, capped at what clients may claim.

        Raises:
            InvalidField: `priority` and `slo_class` disagree.
        """
        name = request.slo_class or ""
        if request.priority is None and self.settings.slo_class_max is None:
            return name
        if request.priority is not None:
            name = self._class_by_priority(request.priority, name)
        cap = self.settings.slo_class_max
        if cap is not None and self.classes.band(name) < self.classes.band(cap):
            self.clamped += 1
            return cap
        return name

    def _class_by_priority(self, priority: int, name: str) -> str:
        classes = self.classes
        at_most = [one for one in classes.bands if one <= priority] or [classes.bands[-1]]
        if not name:
            return classes.name_of(classes.bands.index(at_most[0]))
        if classes.priority(name) != at_most[0]:
            raise InvalidField(
                f"priority {priority} is not that of slo_class {name}, "
                f"which is {classes.priority(name)}",
                field="priority",
            )
        return name

    def refusal(
        self, partition: Partition, decision: AdmissionDecision, rows: Rows
    ) -> AdmissionRefused:
        """Turn a decision into the error that answers the request."""
        admission = partition.admission
        facts = {} if admission is None else admission.exceeded(decision, rows)
        never = decision.retry_after_s == _FOREVER
        return AdmissionRefused(
            f"{decision.reason}: it never fits, with these settings" if never else decision.reason,
            status=self.settings.overload_status,
            code=decision.code,
            gate=decision.gate,
            policy=decision.policy,
            retry_after_s=decision.retry_after_s,
            promised=decision.promised,
            facts=facts,
        )

    def deadline_s(self, ticket: Ticket, *, for_worker: bool) -> float:
        """Return how long a request may wait; infinity: no deadline."""
        settings = self.settings
        if settings.queue_deadline_s is not None:
            return settings.queue_deadline_s
        if not for_worker:
            return _FOREVER
        admission, ask = ticket.partition.admission, ticket.ask
        assert admission is not None
        assert ask is not None
        known_s = known_wait_s(ask, admission, ticket.place)
        if known_s is None:
            return DEADLINE_S
        if ask.target_s == _FOREVER:  # its own target may be shorter than any wait
            known_s = max(known_s, settings.queue_deadline_min_s)
        return min(known_s, settings.queue_deadline_max_s)

    # -- operators -----------------------------------------------------------------------------

    def put(self, change: AdmissionChange) -> None:
        """Validate a policy and put it in force; each gate follows with `apply_to`.

        Raises:
            InvalidField: there is no such policy, or its configuration makes no sense.
        """
        try:
            self.put_in_force(change.policy, change.config)
        except ValueError as error:
            field = "config" if change.policy in NAMES else "policy"
            raise InvalidField(str(error), field=field) from None
        self._mark(ADMISSION, POLICY)

    def apply_to(self, partition: Partition, now: float) -> bool:
        """Apply the policy in force to one gate, or open the gate if it is needed.

        Returns:
            Whether there is a gate: waiting requests may have to be judged again.
        """
        if partition.admission is not None:
            partition.admission.change(self._build(), self._shared_returns, now)
        elif self._wants_gate(partition):
            self._open(partition)
        return partition.admission is not None

    # -- busy thresholds -----------------------------------------------------------------------

    def busy_thresholds(self) -> Generator[None, None, BusyThresholds]:
        """Return what is in force for all models served or named, and for their tenants.

        Pauses after every threshold.
        """
        found = []
        for name in self.threshold_names():
            found.append(self.busy_threshold(*name))
            yield
        return BusyThresholds(found)

    def threshold_names(self) -> list[tuple[str, str | None]]:
        """Return all models served or named, and their tenants, in order."""
        tenants: dict[str, list[str]] = {}
        for model, tenant, _ in self.thresholds.entries():  # in order
            tenants.setdefault(model, []).extend([] if tenant is None else [tenant])
        models = self._catalog.models()
        names: list[tuple[str, str | None]] = []
        for model in sorted(models | tenants.keys()):
            names.append((model, None))
            names += [(model, tenant) for tenant in tenants.get(model, ())]
        return names

    def busy_threshold(self, model: str, tenant_id: str | None) -> BusyThreshold:
        """Return what is in force for a model or one of its tenants."""
        held = self.thresholds.of(model, tenant_id) if self.is_on else NOTHING
        return BusyThreshold(
            model=model, tenant_id=UNSET if tenant_id is None else tenant_id, **held._asdict()
        )

    def change_threshold(
        self, change: BusyThresholdChange, now: float
    ) -> tuple[BusyThreshold, list[Partition]]:
        """Set and clear thresholds of a model or tenant, at once; without any, only read them.

        Raises:
            InvalidRequest: one is out of range, or both set and cleared.
            AdmissionControlOff: they would have no effect.
            ModelNotFound: no worker serves it.
        """
        given = {field: getattr(change, field) for field in FIELDS}
        if not change.clear and not any(value is not None for value in given.values()):
            return self.busy_threshold(change.model, change.tenant_id), []
        try:
            thresholds = read_thresholds(given)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        if not self.is_on:
            raise AdmissionControlOff
        if not self._is_served(change.model, change.tenant_id):
            raise ModelNotFound(change.model, change.tenant_id)
        try:
            self.thresholds.merge(
                change.model,
                change.tenant_id,
                thresholds,
                change.clear,
                entries_max=self._limits.scopes_max,
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        self._mark(THRESHOLD, threshold_key(change.model, change.tenant_id))
        touched = self._apply_thresholds(change.model, now)
        return self.busy_threshold(change.model, change.tenant_id), touched

    def forget_threshold(
        self, model: str, tenant_id: str | None, now: float
    ) -> tuple[BusyThreshold, list[Partition]]:
        """Drop a model's or tenant's thresholds, so that more general ones apply. Repeatable."""
        touched: list[Partition] = []
        if self.thresholds.forget(model, tenant_id):
            self._mark(THRESHOLD, threshold_key(model, tenant_id))
            touched = self._apply_thresholds(model, now)
        return self.busy_threshold(model, tenant_id), touched

    def _is_served(self, model: str, tenant_id: str | None) -> bool:
        return any(
            worker.scope.model_name == model and tenant_id in (None, worker.scope.tenant_id)
            for worker in self._catalog
        )

    def _apply_thresholds(self, model: str, now: float) -> list[Partition]:
        touched = []
        for partition in self._partitions.values():
            if partition.scope.model_name != model:
                continue
            admission = partition.admission
            if admission is not None:
                admission.set_thresholds(self._thresholds_of(partition))
                admission.refresh(now)
                touched.append(partition)
            elif self._wants_gate(partition):
                self._open(partition)
                touched.append(partition)
        return touched

    def _mark(self, kind: str, name: str) -> None:
        if self.changes is not None:
            self.changes.mark(kind, name)


_FOREVER: Final = float("inf")


def _seconds(target_ms: float) -> float:
    """Return a requested time to first token in seconds: replicas read none that is not above 0."""
    if not target_ms > 0.0:  # embedding calls without a codec
        raise InvalidField("slo_ttft_ms must be above 0", field="slo_ttft_ms")
    return target_ms / 1e3 or ulp(0.0)  # the smallest of all are rounded to nothing


def check_admission(settings: AdmissionSettings) -> bool:
    """Validate the admission settings; return whether thresholds are set but have no effect.

    Raises:
        ValueError: the policy, its configuration or the class cap makes no sense.
    """
    built: Built[None] = build(settings.policy, settings.policy_config)
    cap = settings.slo_class_max
    if cap is not None and cap not in built.classes.priorities:
        known = ", ".join(built.classes.priorities)
        raise ValueError(f"--slo-class-max: there is no class {cap!r}; there are {known}")
    given = read_thresholds({field: getattr(settings, field) for field in FIELDS})
    return settings.mode == "none" and given.any


def threshold_key(model: str, tenant_id: str | None) -> str:
    """Return the name of an entry on disk."""
    return model if tenant_id is None else f"{model}\0{tenant_id}"


def scope_of_key(name: str) -> tuple[str, str | None]:
    """Return the model and tenant of such a key."""
    model, has_tenant, tenant = name.partition("\0")
    return model, tenant if has_tenant else None
