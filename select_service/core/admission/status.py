"""The status of admission for operators: what is in force, and the outcomes of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.core.admission.tallies import ClassTally
from select_service.types.admission import AdmissionStatus, ClassCounts, ScopeAdmission

if TYPE_CHECKING:
    from collections.abc import Generator

    from select_service.core.admission.controller import AdmissionController
    from select_service.core.admission.partition_admission import PartitionAdmission
    from select_service.core.membership import Membership
    from select_service.core.partition import Partition


def status_in_steps(
    controller: AdmissionController, membership: Membership
) -> Generator[None, None, AdmissionStatus]:
    """Return what is in force, and the outcomes of requests.

    Pauses after every scope and threshold. Each is reported as of its turn; a scope removed before
    its turn is left out.
    """
    counters: dict[str, ClassTally] = {name: ClassTally() for name in controller.classes.names}
    scopes = []
    for scope in membership.scopes():
        yield
        partition = membership.partitions.get(scope)
        admission = None if partition is None else partition.admission
        if partition is None or admission is None:
            continue
        admission.refresh(admission.now)
        for name, tally in admission.gate.tallies.of.items():
            total = counters.setdefault(name, ClassTally())
            for field in ClassTally.__struct_fields__:
                setattr(total, field, getattr(total, field) + getattr(tally, field))
        scopes.append(_scope(partition, admission))
    thresholds = []
    names = controller.threshold_names()
    yield
    for model, tenant_id in names:
        thresholds.append(controller.busy_threshold(model, tenant_id))
        yield
    return AdmissionStatus(
        policy=controller.policy,
        config=controller.config,
        mode=controller.settings.mode,
        thresholds=thresholds,
        classes=dict(controller.classes.priorities),
        counters={name: _counts(tally) for name, tally in counters.items()},
        scopes=scopes,
    )


def _counts(tally: ClassTally) -> ClassCounts:
    return ClassCounts(**{name: getattr(tally, name) for name in ClassCounts.__struct_fields__})


def _scope(partition: Partition, admission: PartitionAdmission) -> ScopeAdmission:
    gate = admission.gate
    return ScopeAdmission(
        model_name=partition.scope.model_name,
        tenant_id=partition.scope.tenant_id,
        saturation=round(admission.pool.saturation, 6),
        prefill_tokens_per_s=round(admission.pool.prefill_rate, 3),
        waiting=partition.pending_count,
        busy_ranks=admission.busy.count,
        full_ranks=admission.caps.full_slots,
        promises=gate.returns.size,
        flaps=0 if gate.queue is None else sum(gate.queue.flaps),
    )
