"""Replica sync with the live reference, both ways: what it books we carry, and the reverse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.compare import peer
from tests.live.replicas import Replica, ours
from tests.wait import block_until, eventually

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]


@contextlib.contextmanager
def pair(folder: Path, version: str) -> Iterator[tuple[Replica, Replica]]:
    """Ours and theirs, each listening to the other, with the same workers."""
    try:
        python = peer.installed(version)
    except peer.PeerMissing as error:
        pytest.skip(str(error))
    if python is None:
        pytest.skip(f"the reference service {version} is not installed here: make peer")
    we = ours(folder, "ours")
    they = Replica(
        folder / "theirs.log",
        command=peer.command(python),
        args=(),
        peers=[we.replica_endpoint],
    )
    we.args = (*we.args, "--replica-sync-peers", they.replica_endpoint)
    with we, they:
        we.add_worker()
        they.add_worker()
        eventually(lambda: we.metric("replica_peers", state="connected"), 1.0)
        _until_received(we, they)
        yield we, they


def _until_received(we: Replica, they: Replica) -> None:
    """They say nothing by themselves: book until the other has received, then free it."""
    for sender, receiver in ((we, they), (they, we)):
        names: list[str] = []

        def is_received(sender: Replica = sender, receiver: Replica = receiver) -> bool:
            names.append(f"probe-{sender.port}-{len(names)}")
            sender.reserve(names[-1], 2, [])
            return receiver.load(2)[2] > 0

        block_until(is_received)
        for name in names:
            sender.ask("DELETE", f"/reservations/{name}")
        eventually(lambda: (sender.load(2), receiver.load(2)), ((0, 0, 0), (0, 0, 0)))


@pytest.mark.parametrize("version", peer.VERSIONS)
def test_admission_prefill_and_free_both_ways(version: str, tmp_path: Path) -> None:
    with pair(tmp_path, version) as (we, they):
        for here, there, name in ((we, they, "x"), (they, we, "y")):
            here.reserve(name, 1, [1, 2, 3, (1 << 63) - 1])
            for one in (here, there):
                eventually(lambda: one.load(1), (64, 4, 1))
            here.ask("POST", f"/reservations/{name}/prefill_complete")
            eventually(lambda: there.load(1), (0, 4, 1))
            here.ask("DELETE", f"/reservations/{name}")
            eventually(lambda: there.load(1), (0, 0, 0))


@pytest.mark.parametrize("version", peer.VERSIONS)
def test_we_end_what_they_booked_and_they_what_we_did(version: str, tmp_path: Path) -> None:
    with pair(tmp_path, version) as (we, they):
        for here, there, name in ((we, they, "x"), (they, we, "y")):
            here.reserve(name, 1, [1, 2, 3])
            eventually(lambda: there.load(1), (48, 3, 1))
            there.ask("POST", f"/reservations/{name}/prefill_complete")
            eventually(lambda: here.load(1), (0, 3, 1))
            there.ask("DELETE", f"/reservations/{name}")
            eventually(lambda: here.load(1), (0, 0, 0))


@pytest.mark.parametrize("version", peer.VERSIONS)
def test_many_at_once(version: str, tmp_path: Path) -> None:
    """Heartbeats and statements of our own between them disturb nobody."""
    with pair(tmp_path, version) as (we, they):
        for number in range(200):
            (we, they)[number % 2].reserve(f"r{number}", 1 + number % 2, [number])
        for one in (we, they):
            eventually(lambda: [one.load(w)[2] for w in (1, 2)], [100, 100])
        for number in range(200):
            (they, we)[number % 2].ask("DELETE", f"/reservations/r{number}")
        for one in (we, they):
            eventually(lambda: [one.load(w) for w in (1, 2)], [(0, 0, 0)] * 2)


@pytest.mark.parametrize("version", peer.VERSIONS)
def test_they_carry_what_lives_under_our_leases(version: str, tmp_path: Path) -> None:
    with pair(tmp_path, version) as (we, they):
        lease = {"lease_id": "l", "owner": "o", "ttl_s": 2.0}
        we.ask("POST", "/leases", lease, ok=(201,))
        we.reserve("x", 1, [1, 2, 3], lease_id="l")
        we.reserve("y", 1, [4], ttl_s=3.5)
        eventually(lambda: they.load(1), (64, 4, 2))
        we.ask("POST", "/leases/l/renew")
        they.ask("POST", "/reservations/x/prefill_complete")
        eventually(lambda: we.load(1), (16, 4, 2))
        for one in (we, they):  # what is missed here ends there
            eventually(lambda: one.load(1), (0, 0, 0))


@pytest.mark.parametrize("version", peer.VERSIONS)
def test_they_carry_both_legs_of_a_pair(version: str, tmp_path: Path) -> None:
    with pair(tmp_path, version) as (we, they):
        for worker_id, role in ((1, "prefill"), (2, "decode")):
            we.ask("PATCH", f"/workers/{worker_id}", {"role": role})
        prompt = {"block_hashes": [1, 2, 3], "sequence_hashes": [1, 2, 3], "isl_tokens": 48}
        we.ask("POST", "/select_pair", prompt | {"reservation_id": "p"})
        for one in (we, they):
            eventually(lambda: [one.load(w) for w in (1, 2)], [(48, 0, 1), (0, 3, 1)])
        they.ask("POST", "/reservations/p:prefill/prefill_complete")
        eventually(lambda: we.load(1), (0, 0, 1))
        we.ask("DELETE", "/reservations/p")
        for one in (we, they):
            eventually(lambda: [one.load(w) for w in (1, 2)], [(0, 0, 0)] * 2)
