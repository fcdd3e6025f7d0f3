"""An end that was acknowledged by a replica that died before it had sent it to any other.

With a state directory the end is on disk before the answer, and is sent in the next life: the
owner's reservation has no lease and no time to live here, so nothing else would end it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.proxy import HEALTHY, REFUSING, Proxy
from tests.live.replicas import agree, ours
from tests.wait import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

FOR_EVER = ("--reservation-ttl-s", "0")


def test_what_a_dead_replica_has_ended_is_over_when_it_is_back(tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path / "state"))
    with (
        ours(tmp_path, "owner", *FOR_EVER) as owner,
        ours(tmp_path, "other", *FOR_EVER, *state, peers=[owner.replica_endpoint]) as other,
        Proxy(other.replica_port) as way,
    ):
        owner.listen_to(way.endpoint)
        for one in (owner, other):
            one.add_worker(1)
            eventually(lambda: one.metric("replica_publishers", state="synced"), 1.0)
        for name in ("ended", "kept"):
            owner.reserve(name, 1, range(2))
        eventually(lambda: other.load(1)[2], 2)
        way.set(REFUSING)  # nobody receives it any more
        assert other.request("DELETE", "/reservations/ended").status == 200
        assert other.process is not None
        other.process.kill()
        other.process.wait()
        way.set(HEALTHY)
        assert owner.load(1)[2] == 2, "nobody has sent it"
        other.__enter__()
        eventually(lambda: owner.load(1)[2], 1)
        eventually(lambda: other.load(1)[2], 1)
        agree([owner, other])
        assert owner.request("DELETE", "/reservations/ended").status == 200, "remembered as freed"
        assert owner.request("DELETE", "/reservations/kept").status == 200
        eventually(lambda: other.load(1)[2], 0)
