"""Two replicas between which bytes are changed, cut out, repeated and swapped, and then no more.

Nobody dies of it, nothing is counted twice while it lasts, and afterwards both carry what clients
have. Encrypted, nothing that was changed or repeated is believed: what a replica carries is at no
moment anything but what clients have booked.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from indexer.edge.curve import new_key_file
from tests.faults.proxy import HEALTHY, Fault, Proxy
from tests.live.replicas import Replica, agree, ours
from tests.live.window import WATCHED
from tests.wait import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

STORM = Fault(garbled=0.06, cut=0.02, repeated=0.02, swapped=0.02)
"""Of pieces, a message each mostly: a connection lasts for some before libzmq gives it up."""

ACTS = 60
MANGLED = 3
"""A round lasts until so many pieces were changed each way."""

HASHES = 2
WORKERS = (1, 2)


@contextlib.contextmanager
def pair(
    folder: Path, *, encrypted: bool, seed: int
) -> Iterator[tuple[list[Replica], list[Proxy]]]:
    """Two that receive each other through proxies."""
    flags: tuple[str, ...] = ()
    if encrypted:
        new_key_file(str(folder / "key"))
        flags = ("--curve-key", str(folder / "key"))
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(ours(folder, n, *flags, command=WATCHED)) for n in "ab"]
        ways = []
        for number, (speaker, hearer) in enumerate((both, both[::-1])):
            ways.append(stack.enter_context(Proxy(speaker.replica_port, seed=seed + number)))
            hearer.listen_to(ways[-1].endpoint)
        for one in both:
            one.add_worker(*WORKERS)
        for one in both:
            eventually(lambda: one.metric("replica_publishers", state="synced"), 1.0)
        yield both, ways


def name_of(number: int) -> str:
    """An id that none of the others is with a bit changed: such a one is booked until mended."""
    return hashlib.blake2b(str(number).encode(), digest_size=8).hexdigest()


def names(replica: Replica) -> set[str]:
    """What it carries; its own books are right, or this is a 500."""
    view = replica.view()
    found = [one.name for one in view.booked]
    assert len(found) == len(set(found)), "counted twice"
    carried = sum(row.active_requests for scope in view.loads for row in scope.loads)
    assert carried == len(found)
    return set(found)


def live_on(
    both: list[Replica], dice: random.Random, live: dict[str, Replica], names_: Any
) -> None:
    """Clients book and free, each at the replica it has booked at."""
    for _ in range(ACTS):
        if live and dice.random() < 0.4:
            name = dice.choice(sorted(live))
            live.pop(name).ask("DELETE", f"/reservations/{name}")
        else:
            replica, number = dice.choice(both), next(names_)
            name = name_of(number)
            first = 100 * number
            replica.reserve(name, dice.choice(WORKERS), range(first, first + HASHES))
            live[name] = replica


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_what_is_garbled_kills_nobody_and_is_mended(tmp_path: Path, *, encrypted: bool) -> None:
    garble(tmp_path, encrypted=encrypted, seed=1, rounds=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_what_is_garbled_for_long(tmp_path: Path, seed: int, *, encrypted: bool) -> None:
    garble(tmp_path, encrypted=encrypted, seed=10 * seed, rounds=5)


def garble(folder: Path, *, encrypted: bool, seed: int, rounds: int) -> None:
    dice, numbers = random.Random(seed), itertools.count()
    live: dict[str, Replica] = {}
    with pair(folder, encrypted=encrypted, seed=seed) as (both, ways):
        for _ in range(rounds):
            for way in ways:
                way.set(STORM)
            ever = set(live)
            before = [way.mangled for way in ways]
            while any(way.mangled < was + MANGLED for way, was in zip(ways, before, strict=True)):
                live_on(both, dice, live, numbers)
                ever |= {name_of(number) for number in range(next(numbers))}
                for one in both:
                    assert one.request("GET", "/health").status == 200
                    found = names(one)
                    own = {name for name, at in live.items() if at is one}
                    assert own <= found, "what was acknowledged here is here"
                    assert not encrypted or found <= ever, "nothing is made up"
            for way in ways:
                way.set(HEALTHY)
            wanted = set(live)
            for one in both:
                eventually(lambda: names(one), wanted)
            agree(both)
        for one in both:
            assert one.process is not None
            assert one.process.poll() is None
            assert "Traceback" not in one.log_path.read_text()
