"""A bound token reaches its tenant's reservations on workers that only another replica has."""

from __future__ import annotations

import pytest

from select_service.edge.tenancy.tenant_ids import TenantIds, prefix_of
from select_service.errors import ReservationNotFound
from tests.select_service.core.replication.replica import Replica, acquainted, tell


def known(name: str, tenant_id: str) -> Replica:
    """A replica that knows of a reservation, and lacks its worker."""
    here, there = acquainted()
    there.worker(9, tenant_id=tenant_id)
    there.take(name, 1, 2, tenant_id=tenant_id)
    tell(there, here)
    assert here.core.lifecycle.tenant_of(name) == tenant_id
    return here


@pytest.mark.parametrize("is_plain", [False, True])
def test_its_own(is_plain: bool) -> None:
    kept = "r" if is_plain else prefix_of("ours") + "r"  # unbound clients book plain ids
    here = known(kept, "ours")
    foreign: list[None] = []
    names = TenantIds(here.core, ("others", "ours"), lambda: foreign.append(None))
    assert names.reservation("r") == kept
    here.done(names.reservation("r"))
    here.free(names.reservation("r"))
    assert not foreign


@pytest.mark.parametrize("is_plain", [False, True])
def test_not_another_tenants(is_plain: bool) -> None:
    here = known("r" if is_plain else prefix_of("ours") + "r", "theirs")
    foreign: list[None] = []
    names = TenantIds(here.core, ("ours",), lambda: foreign.append(None))
    with pytest.raises(ReservationNotFound):
        here.done(names.reservation("r"))
    with pytest.raises(ReservationNotFound):
        here.free(names.reservation("r"))
    assert len(foreign) == 2
