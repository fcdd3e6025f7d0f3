"""Rings of tenants that enter the token file and leave it."""

from __future__ import annotations

import pytest

from select_service.core.decisions import tenant_rings
from select_service.core.decisions.plain_record_ring import RecordRing
from select_service.core.decisions.tenant_rings import TenantRings
from select_service.core.tenancy.shares import Shares
from select_service.types import CoreLimits


def test_a_tenant_has_a_ring_however_many_were_in_the_file_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenant_rings, "RINGS_MAX", 3)
    shares = Shares(CoreLimits())
    made = TenantRings(RecordRing, shares, count_max=64, bytes_max=1 << 20, first=1)
    firsts: dict[str, int] = {}
    for number in range(9):
        names = [f"t{number}", f"t{number + 1}"]
        shares.name(names, others=True)
        made.follow_tenants()
        for name in names:
            ring = made.of(name)
            assert ring is not made.common, name
            assert ring is made.of(name)
            firsts[name] = ring.next
        assert len(list(made)) == 3
    assert made.of("t0") is made.common
    # a ring's numbers are nobody else's at that time, and there are three times as many at most
    assert firsts["t8"] != firsts["t9"]
    assert len(set(firsts.values())) == 3
    shares.name([f"t{number}" for number in range(4)], others=True)
    made.follow_tenants()
    apart = [made.of(f"t{number}") for number in range(4)]
    assert apart.count(made.common) == 1, "there are more tenants than rings"
