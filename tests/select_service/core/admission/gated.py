"""Fleets with a gate, and what tests ask of them."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.core.admission.partition_admission import PartitionAdmission
from select_service.core.admission.tallies import ClassTally
from select_service.errors import AdmissionRefused
from select_service.types.admission import AdmissionChange, AdmissionSettings, BusyThresholdChange
from tests.select_service.core.whole_fleet import DEFAULT, Fleet
from tests.sliced import put_in_force


def fleet(workers: int = 1, record: dict[str, Any] | None = None, **settings: Any) -> Fleet:
    """Some workers behind a gate."""
    made = Fleet(admission=AdmissionSettings(**settings))
    for worker_id in range(1, workers + 1):
        made.worker(worker_id, **(record or {}))
    return made


def keeper_of(some: Fleet) -> PartitionAdmission:
    keeper = some.core.partitions[DEFAULT].admission
    assert keeper is not None
    return keeper


def tally(some: Fleet, name: str = "standard") -> ClassTally:
    return keeper_of(some).gate.tallies.of[name]


def refused(some: Fleet, *hashes: int, **fields: Any) -> AdmissionRefused:
    """Ask for a booking that is refused; nothing may be booked by that."""
    before = len(some.core.lifecycle.bookings.freed), len(some.core.lifecycle.bookings)
    with pytest.raises(AdmissionRefused) as caught:
        some.take(None, *hashes, **fields)
    assert before == (len(some.core.lifecycle.bookings.freed), len(some.core.lifecycle.bookings))
    some.core.check()
    return caught.value


def threshold(**fields: Any) -> BusyThresholdChange:
    return BusyThresholdChange(**({"model": "default"} | fields))


def change(some: Fleet, policy: str, **config: Any) -> None:
    for effects in put_in_force(some.core, AdmissionChange(policy=policy, config=config), some.now):
        some._did(effects)
