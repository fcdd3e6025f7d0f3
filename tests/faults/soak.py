"""A soak: everything happens at once, for as long as one likes, and nothing may grow.

Two replicas, a third that comes and goes, engines that churn and restart, partitions that are made
and deleted, clients at both. All the while memory, descriptors, threads, tasks and the latency of
/health are noted; in the end the last third has to look like the middle one, counters add up, and
load and index are true. `make soak MINUTES=10` writes a table and a picture to build/.

`make test-full` has it live for ten minutes beside other tests, gently and at the lowest priority
(`GENTLE`). How long /health takes is then what the neighbours leave, by the second; so it is not
the slowest of a hundred answers that must stay the same but the middle one, and the processor time
that a request costs, which neighbours change little.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self

from tests.faults.engine import Engine, engines
from tests.faults.patient import HEALTH_P99_LOADED_MS, Patient, service
from tests.faults.probe import PAUSE_S, Probe, share
from tests.faults.traffic import Traffic
from tests.faults.vitals import vitals
from tests.live.replicas import Replica
from tests.live.window import BIN, TASKS
from tests.wait import eventually

SAMPLES = 60
LOOKS_PER_COLLECTION = 10
"""Then all garbage is collected, as it is in the next quiet moment: here there is none."""
FORGETFUL = (
    *("--freed-ids-max", "500", "--replica-ended-max", "500", "--scope-linger-s", "5"),
    *("--decision-ring", "200"),
)
"""What is remembered for ten minutes by default grows for as long; here it is full at once."""

ENDS = ("freed", "expired", "lease_ended", "dropped")

CPU_ROOM = 1.5
"""Times what a request of the middle third has cost; at the least this many milliseconds more."""
CPU_SLACK_MS = 1.0

MIDDLE_MS = 50.0
"""The middle one of all answers of /health may always take so long, beside neighbours."""


@dataclass(frozen=True)
class Pace:
    """How much happens."""

    client_pause_s: float = 0.02
    probe_pause_s: float = PAUSE_S
    churn_per_second: int = 100
    partition_s: float = 0.2
    join_s: float = 3.0
    is_alone: bool = True  # else latencies show more of the neighbours than of us


BRISK_PACE = Pace()
GENTLE = Pace(0.4, 0.25, 10, 2.0, 60.0, is_alone=False)
"""Less than a tenth of a processor, clients and engines included."""

ROOM = {"rss_mb": 0.05, "fds": 0.02, "threads": 0.0, "tasks": 0.02}
SLACK = {"rss_mb": 4.0, "fds": 3.0, "threads": 0.0, "tasks": 4.0}
"""By so much the last third may exceed the middle one: a share, and a number besides (sockets and
tasks of what is under way at that moment)."""


@dataclass(frozen=True)
class Sample:
    """One replica at one moment."""

    at_s: float
    rss_mb: float
    fds: float
    threads: float
    tasks: float
    cpu_s: float
    answered: int  # to the clients


@dataclass
class Soak:
    """What was seen; `faults` is empty where all is well."""

    samples: dict[str, list[Sample]]
    latencies: list[tuple[float, float]]  # seconds since the start, milliseconds
    statuses: str
    turns: dict[str, int]
    faults: list[str]
    pace: Pace = BRISK_PACE

    def __str__(self) -> str:
        lines = ["replica  third     rss MB   fds  threads  tasks"]
        for name, samples in self.samples.items():
            for third, part in zip(("first", "middle", "last"), thirds(samples), strict=True):
                row = [median(part, what) for what in ROOM]
                lines.append(
                    f"{name:<8} {third:<8} {row[0]:7.1f} {row[1]:5.0f} {row[2]:8.0f} {row[3]:6.0f}"
                )
            costs = ", ".join(f"{ms:.2f}" for ms in map(cost_ms, thirds(samples)))
            lines.append(f"{name:<8} processor time of a request, by third: {costs} ms")
        for third, waits in zip(("first", "middle", "last"), thirds(self.latencies), strict=True):
            some = [ms for _, ms in waits]
            lines.append(
                f"/health, {third} third: p50 {share(some, 0.5):.2f} ms, "
                f"p99 {share(some, 0.99):.1f} ms, max {max(some):.0f} ms"
            )
        turns = ", ".join(f"{count} {what}" for what, count in self.turns.items())
        return "\n".join([*lines, f"answers: {self.statuses}", turns, *self.faults])


class Turns(threading.Thread):
    """Somebody who does one thing again and again; an error ends it, and is reported in the end."""

    def __init__(self, what: Callable[[], None], pause_s: float) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self.error: BaseException | None = None
        self._what = what
        self._pause_s = pause_s
        self._over = threading.Event()

    def run(self) -> None:
        try:
            while not self._over.wait(self._pause_s):
                self._what()
                self.count += 1
        except BaseException as error:  # noqa: BLE001 - reported to who waits
            self.error = error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(60)
        if self.error is not None:
            raise self.error


def soak(folder: Path, seconds: float, pace: Pace = BRISK_PACE) -> Soak:
    """Live through it."""
    with contextlib.ExitStack() as stack:
        a, b = (stack.enter_context(service(_made(folder / name), *FORGETFUL)) for name in "ab")
        publishing = stack.enter_context(engines(2, first=41))
        for one, other in ((a, b), (b, a)):
            one.listen_to(other.replica_endpoint)
            Patient(one, publishing).register()
        for engine in publishing:
            engine.run(pace.churn_per_second)
        began = time.monotonic()
        samples: dict[str, list[Sample]] = {"a": [], "b": []}
        traffics = [
            Traffic([one.port], [41, 42], clients=count, seed=number, pause_s=pace.client_pause_s)
            for number, (one, count) in enumerate([(a, 3), (b, 2)])
        ]
        numbers = itertools.count()
        with contextlib.ExitStack() as busy:
            probe = busy.enter_context(Probe(a.port, pause_s=pace.probe_pause_s))
            for traffic in traffics:
                busy.enter_context(traffic)
            turns = {
                "partitions made and deleted": Turns(
                    lambda: come_and_go(a, next(numbers)), pace.partition_s
                ),
                "replicas joined and left": Turns(
                    lambda: join_and_leave(folder, a, b), min(pace.join_s, seconds / 6)
                ),
                "restarts of an engine": Turns(publishing[0].restart, seconds / 12),
            }
            for turn in turns.values():
                busy.enter_context(turn)
            while (passed := time.monotonic() - began) < seconds:
                for name, replica, traffic in zip(samples, (a, b), traffics, strict=True):
                    if len(samples[name]) % LOOKS_PER_COLLECTION == 0:
                        replica.ask("GET", BIN)
                    samples[name].append(sample(replica, passed, traffic))
                time.sleep(seconds / SAMPLES)
        found = Soak(
            samples,
            [(at - began, ms) for at, ms in probe.seen],
            str(
                dict(
                    sorted(
                        sum(
                            (one.statuses for one in traffics), type(traffics[0].statuses)()
                        ).items()
                    )
                )
            ),
            {what: one.count for what, one in turns.items()},
            [],
            pace,
        )
        found.faults += [text for traffic in traffics for text in traffic.odd]
        found.faults += growth(found)
        found.faults += settle(a, b, publishing, traffics)
        return found


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def sample(replica: Replica, at_s: float, traffic: Traffic) -> Sample:
    """Look at a replica."""
    assert replica.process is not None
    seen = vitals(replica.process.pid)
    tasks: Any = replica.ask("GET", TASKS)
    numbers = seen.rss_mb, seen.fds, seen.threads, tasks["count"], seen.cpu_s
    return Sample(at_s, *numbers, answered=traffic.statuses.total())


def come_and_go(replica: Replica, number: int) -> None:
    """A partition with a worker, a booking in it, and its end; every third has engines' events."""
    tenant, worker_id = f"tenant-{number}", 1000 + number
    worker = {"worker_id": worker_id, "tenant_id": tenant, "endpoint": "http://w"}
    more = {"block_size": 16, "kv_events_endpoint": "tcp://127.0.0.1:9"}
    replica.ask("POST", "/workers", worker | more, ok=(201,))
    prompt = {"tenant_id": tenant, "token_ids": list(range(64))}
    replica.ask("POST", "/select_and_reserve", prompt | {"reservation_id": f"of-{tenant}"})
    if number % 2:
        replica.ask("DELETE", f"/reservations/of-{tenant}")
    replica.ask("DELETE", f"/workers/{worker_id}")


def join_and_leave(folder: Path, a: Replica, b: Replica) -> None:
    """A third replica receives all that is booked, books, and is killed or leaves."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        with service(Path(own)) as third:
            for one, other in ((third, a), (third, b), (a, third), (b, third)):
                one.listen_to(other.replica_endpoint)
            eventually(lambda: third.metric("replica_publishers", state="synced") >= 2, True)
            third.add_worker(41, 42)
            third.reserve("of-the-third", 41, range(4))
            third.ask("DELETE", "/reservations/of-the-third")
        for one in (a, b):
            endpoint = {"endpoint": third.replica_endpoint}
            one.ask("POST", "/replica_sync/deregister_peer", endpoint)


# -- the end ---------------------------------------------------------------------------------------


def settle(
    a: Replica, b: Replica, publishing: list[Engine], traffics: list[Traffic]
) -> Iterator[str]:
    """Say what is not as it should be when all is quiet."""
    for engine in publishing:
        engine.run(0)
    for traffic in traffics:
        traffic.resolve_doubts()
    wanted = {name for traffic in traffics for name in traffic.live}
    try:
        for one in (a, b):
            Patient(one, publishing).index_is_true()
            eventually(lambda: {row.name for row in one.view().booked}, wanted)
        for traffic in traffics:
            traffic.free_all()
        for one in (a, b):
            eventually(lambda: one.view().booked, [])
    except AssertionError as error:
        yield str(error)[:500]
    for name, one in (("a", a), ("b", b)):
        came, went = balance(one)
        if came != went:
            yield f"{name}: {came:.0f} reservations came, {went:.0f} went, none is left"


def balance(one: Replica) -> tuple[float, float]:
    """What began here, by a caller or by messages, and what ended."""
    came = one.metric("reservation_events_total", event="booked")
    went = sum(one.metric("reservation_events_total", event=event) for event in ENDS)
    received = one.metric("replica_reservations_total", event="booked")
    over = one.metric("replica_reservations_total", event="freed")
    return came + received, went + over


def growth(of: Soak) -> Iterator[str]:
    """Say what is larger in the last third than in the one before."""
    for name, samples in of.samples.items():
        _, middle, last = thirds(samples)
        for what, room in ROOM.items():
            before, after = median(middle, what), median(last, what)
            if after > before * (1 + room) + SLACK[what]:
                yield f"{name}: {what} grows, {before:.1f} and then {after:.1f}"
        _, before_ms, after_ms = map(cost_ms, thirds(samples))
        if not of.pace.is_alone and after_ms > CPU_ROOM * before_ms + CPU_SLACK_MS:
            yield f"{name}: a request costs {before_ms:.2f} ms and then {after_ms:.2f} ms"
    part = 0.99 if of.pace.is_alone else 0.5
    _, before_ms, after_ms = (share([ms for _, ms in one], part) for one in thirds(of.latencies))
    if after_ms > max(2 * before_ms, HEALTH_P99_LOADED_MS if of.pace.is_alone else MIDDLE_MS):
        yield f"/health becomes slow: p{part:.0%} {before_ms:.1f} ms and then {after_ms:.1f} ms"


def cost_ms(samples: list[Sample]) -> float:
    """Processor time of a request, with a share of all that happens beside."""
    first, last = samples[0], samples[-1]
    return 1e3 * (last.cpu_s - first.cpu_s) / max(1, last.answered - first.answered)


def thirds(values: list[Any]) -> list[list[Any]]:
    """Three parts of a list."""
    third = max(1, len(values) // 3)
    return [values[:third], values[third : 2 * third], values[2 * third :]]


def median(samples: list[Sample], what: str) -> float:
    """Of one column."""
    return float(statistics.median(getattr(one, what) for one in samples))


def draw(of: Soak, path: Path) -> bool:
    """A picture, where matplotlib is installed."""
    try:
        import matplotlib as mpl  # not needed by tests
    except ImportError:
        return False
    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(ROOM) + 1, 1, sharex=True, figsize=(8, 10))
    for axis, what in zip(axes, ROOM, strict=False):
        for samples in of.samples.values():
            axis.plot([one.at_s for one in samples], [getattr(one, what) for one in samples])
        axis.set_ylabel(what)
    axes[-1].plot(*zip(*of.latencies, strict=True), ".", markersize=1)
    axes[-1].set_ylabel("/health ms")
    axes[-1].set_xlabel("seconds")
    figure.savefig(path)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--gentle", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build"))
    asked = parser.parse_args()
    asked.out.mkdir(exist_ok=True, parents=True)
    with tempfile.TemporaryDirectory() as folder:
        found = soak(Path(folder), 60 * asked.minutes, GENTLE if asked.gentle else BRISK_PACE)
    rows = [
        ",".join([name, *map(str, astuple(one))])
        for name, samples in found.samples.items()
        for one in samples
    ]
    (asked.out / "soak.csv").write_text(
        "\n".join(["replica,s,rss,fds,threads,tasks,cpu,answered", *rows])
    )
    (asked.out / "soak.txt").write_text(f"{found}\n")
    draw(found, asked.out / "soak.svg")
    print(found)
    return bool(found.faults)


if __name__ == "__main__":
    sys.exit(main())
