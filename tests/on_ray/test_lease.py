"""Two planners on a real Ray: both at once, one killed or stopped, the actor gone or silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from select_service.planner.edge.leases import lease_actor
from select_service.planner.edge.leases.ray_lease import NAMESPACE
from tests.on_ray.cluster import Cluster, wait_until

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

DURATION_S = 3.0
ACTING_S = DURATION_S / 3  # what its holder does may take so long


class Contender:
    """One process, and what it has said."""

    def __init__(self, name: str, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.on_ray.contender", name, str(DURATION_S)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RAY_ADDRESS": address},
        )
        self.said: list[tuple[bool, float]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, _, at = line.partition(" ")
            if word in ("held", "not"):  # Ray says something, too
                self.said.append((word == "held", float(at)))

    @property
    def holds(self) -> bool:
        return bool(self.said) and self.said[-1][0]

    def looks_again(self, wanted: bool) -> Callable[[], bool]:
        """From now on."""
        begun = len(self.said)
        return lambda: any(is_held == wanted for is_held, _ in self.said[begun:])

    def lapsed_since(self, begun: int) -> bool:
        """Whether at some time no answer for a whole duration said that it holds the lease."""
        held = [at for is_held, at in self.said[begun - 1 :] if is_held]
        return max(later - at for at, later in pairwise([*held, self.said[-1][1]])) > DURATION_S

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


@pytest.fixture
def contenders(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[list[Contender]]:
    import ray

    address = ray.get_runtime_context().gcs_address
    found = [Contender(request.node.name, address) for _ in range(2)]
    yield found
    for one in found:
        one.kill()
    _never_both(found)
    ray.kill(ray.get_actor(request.node.name, namespace=NAMESPACE), no_restart=True)


def _never_both(contenders: list[Contender]) -> None:
    """Whatever one does after the answer that it holds the lease, the other does not begin."""
    acts = sorted(
        (at, number) for number, one in enumerate(contenders) for is_held, at in one.said if is_held
    )
    assert acts
    last: dict[int, float] = {}
    for at, number in acts:
        last[number] = at
        assert at > last.get(1 - number, at - 10.0) + ACTING_S


def _leader(contenders: list[Contender]) -> tuple[Contender, Contender]:
    wait_until(lambda: any(one.holds for one in contenders), "one holds it")
    wait_until(lambda: all(one.said for one in contenders), "both look")
    one, other = contenders
    return (one, other) if one.holds else (other, one)


def test_two_that_start_at_once_never_both_act(contenders: list[Contender]) -> None:
    leader, other = _leader(contenders)
    wait_until(lambda: len(other.said) > 20, "the other goes on asking")
    assert leader.holds
    assert not any(is_held for is_held, _ in other.said)


def test_who_is_killed_is_followed(contenders: list[Contender]) -> None:
    leader, other = _leader(contenders)
    leader.process.send_signal(signal.SIGKILL)
    wait_until(lambda: other.holds, "the other has taken over")


def test_who_was_cut_off_finds_that_another_acts(contenders: list[Contender]) -> None:
    leader, other = _leader(contenders)
    leader.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: other.holds, "the other has taken over")
    again = leader.looks_again(wanted=False)
    leader.process.send_signal(signal.SIGCONT)
    wait_until(again, "it has been answered")
    assert other.holds


@pytest.mark.parametrize("restarts", [True, False])
def test_the_actor_dies_and_its_holder_goes_on(
    contenders: list[Contender], request: pytest.FixtureRequest, restarts: bool
) -> None:
    """By a machine's end (it is started again), or by somebody's hand (the next look makes one)."""
    import ray

    for _ in range(5):
        leader, other = _leader(contenders)
        ray.kill(ray.get_actor(request.node.name, namespace=NAMESPACE), no_restart=not restarts)
        begun = len(leader.said), len(other.said)
        wait_until(lambda: len(leader.said) > begun[0] + 40, "it goes on")
        wait_until(lambda: len(other.said) > begun[1] + 20, "and the other")
        if not leader.lapsed_since(begun[0]):
            break  # else the machine took so long for a new actor that it was right to stop
    else:
        pytest.fail("no actor was there again within the time of a lease")
    assert leader.holds
    assert not any(is_held for is_held, _ in other.said[begun[1] :])


def test_an_actor_that_does_not_answer_gives_nobody_the_right(
    contenders: list[Contender], request: pytest.FixtureRequest
) -> None:
    import ray

    leader, _ = _leader(contenders)
    actor = ray.get_actor(request.node.name, namespace=NAMESPACE)
    process: int = ray.get(actor.__ray_call__.remote(_process_of))
    lost = leader.looks_again(wanted=False)
    os.kill(process, signal.SIGSTOP)
    try:
        wait_until(lost, "it does not know any more")
    finally:
        os.kill(process, signal.SIGCONT)
    wait_until(lambda: any(one.holds for one in contenders), "one holds it again")


def _process_of(_: object) -> int:
    return os.getpid()


def test_the_actor_needs_nothing_of_this_package_where_it_runs(cluster: Cluster) -> None:
    import ray

    ray.cloudpickle.register_pickle_by_value(lease_actor)
    try:
        shipped: Any = ray.cloudpickle.dumps(lease_actor.LeaseActor)
    finally:
        ray.cloudpickle.unregister_pickle_by_value(lease_actor)
    elsewhere = (
        "import pickle, sys; sys.modules['select_service'] = None; "
        "made = pickle.load(sys.stdin.buffer)(); "
        "print(made.hold('a', 1.0, holds=True), made.hold('b', 1.0, holds=False))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", elsewhere], input=shipped, capture_output=True, check=True
    )
    assert ended.stdout.split() == [b"a", b"a"]
