"""What a run is judged by; every client that counts is in exactly one outcome.

A refusal is a miss unless the client's return gets in and is in time, counted from its first
attempt. Both are shown: with returns and without.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.admission.workload import SHEDDABLE, WEIGHTS, Client

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.admission.play import Play
    from bench.admission.worker import WorkerSettings

__all__ = ["ClassResult", "Result", "jain", "max_min_shares", "measure", "outcome_of"]

INVERSION_WINDOW_S = 0.1

IN_TIME, LATE, UNFINISHED, REFUSED, FAILED = "in-time", "late", "unfinished", "refused", "failed"


def outcome_of(client: Client) -> str:
    """Name what became of a client: one of five, with what else there is to say behind a colon.

    in-time[:returned], late[:returned], unfinished, refused:<last reason>, failed.
    """
    if client.failure:
        return FAILED
    if client.first_token_at is not None:
        in_time = client.first_token_at - client.arrives_at <= client.target_s
        returned = ":returned" if client.tries > 1 else ""
        return (IN_TIME if in_time else LATE) + returned
    # Still in line at the end of the run, by then its target has passed. A return that is due
    # after the end would be late as well: it counts as refused.
    if client.admitted_at is None and len(client.refusals) == client.tries:
        return f"{REFUSED}:{client.refusals[-1]}"
    return UNFINISHED


def jain(values: Iterable[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has everything; 1 for none."""
    some = list(values)
    squares = sum(value * value for value in some)
    return sum(some) ** 2 / (len(some) * squares) if squares else 1.0


def max_min_shares(demands: Sequence[float], room: float) -> list[float]:
    """Share room fairly: none gets more than asked for, what is left over goes to the others."""
    shares = [0.0] * len(demands)
    left = sorted(range(len(demands)), key=lambda one: demands[one])
    while left:
        one = left.pop(0)
        shares[one] = min(demands[one], room / (len(left) + 1))
        room -= shares[one]
    return shares


@dataclass(frozen=True, slots=True)
class ClassResult:
    """One class, or one tenant."""

    offered: int
    in_time_at_first: int
    in_time: int  # those that returned included
    ttft_p50_s: float | None
    ttft_p99_s: float | None

    @property
    def attained_at_first(self) -> float:
        """Share in time at the first attempt."""
        return self.in_time_at_first / self.offered if self.offered else 1.0

    @property
    def attained(self) -> float:
        """Share in time."""
        return self.in_time / self.offered if self.offered else 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """One policy under one load."""

    classes: dict[str, ClassResult]
    tenants: dict[str, ClassResult]
    outcomes: dict[str, int]
    reasons: dict[str, int]  # of all refusals, first and second
    goodput: float  # requests in time per second
    goodput_tokens: float  # their input and output tokens
    utility: float  # weighted share in time
    jain_overall: float  # over tenants, of the share in time
    jain_in_class: dict[str, float]  # over tenants, of work in time against the max-min share
    inversions: int
    first_retries: int  # returns under load
    first_retries_in: int
    told_later: int  # asked to return after the end of the run
    lateness_s: float

    @property
    def offered(self) -> int:
        """Requests that count; 1 if there were none."""
        return max(1, sum(one.offered for one in self.classes.values()))

    @property
    def attained(self) -> float:
        """Share of all in time."""
        return sum(one.in_time for one in self.classes.values()) / self.offered

    @property
    def attained_at_first(self) -> float:
        """Share of all in time at the first attempt."""
        return sum(one.in_time_at_first for one in self.classes.values()) / self.offered

    @property
    def first_retry(self) -> float | None:
        """Share of the returns that got in; nothing if none returned."""
        return self.first_retries_in / self.first_retries if self.first_retries else None


def measure(play: Play, refused_at: Sequence[tuple[float, str]]) -> Result:
    """Judge a finished play.

    Args:
        play: what was played.
        refused_at: (time, class) of each refusal, in order, as the player noted them.
    """
    clients = play.measured()
    seconds = play.script.seconds
    classes = {
        name: _of([one for one in clients if one.slo_class == name])
        for name in play.script.workload.classes
    }
    names = sorted({client.tenant_id for client in clients})
    tenants = {name: _of([one for one in clients if one.tenant_id == name]) for name in names}
    good = [client for client in clients if outcome_of(client).startswith(IN_TIME)]
    came_back = [client for client in clients if client.returned_at is not None]
    # Those that came back shortly before the end and wait would count as not let in: they are left
    # out unless they were answered.
    answered = [one for one in came_back if one.admitted_at is not None or len(one.refusals) > 1]
    worth = sum(WEIGHTS[client.slo_class] for client in clients)
    return Result(
        classes=classes,
        tenants=tenants,
        outcomes=dict(sorted(Counter(map(outcome_of, clients)).items())),
        reasons=dict(sorted(Counter(one for c in clients for one in c.refusals).items())),
        goodput=len(good) / seconds,
        goodput_tokens=sum(one.tokens + one.output_tokens for one in good) / seconds,
        utility=sum(WEIGHTS[one.slo_class] for one in good) / worth if worth else 1.0,
        jain_overall=jain(one.attained for one in tenants.values()),
        jain_in_class={
            name: _jain_of_class(clients, name, play.script.settings) for name in classes
        },
        inversions=_inversions(play, refused_at),
        first_retries=len(answered),
        first_retries_in=sum(one.admitted_at is not None for one in answered),
        told_later=sum(one.returns_at is not None for one in clients),
        lateness_s=play.latest_s,
    )


def _of(clients: Sequence[Client]) -> ClassResult:
    outcomes = Counter(map(outcome_of, clients))
    waits = sorted(
        one.first_token_at - one.arrives_at for one in clients if one.first_token_at is not None
    )
    return ClassResult(
        offered=len(clients),
        in_time_at_first=outcomes[IN_TIME],
        in_time=outcomes[IN_TIME] + outcomes[f"{IN_TIME}:returned"],
        ttft_p50_s=waits[len(waits) // 2] if waits else None,
        ttft_p99_s=waits[int(len(waits) * 0.99)] if waits else None,
    )


def _jain_of_class(clients: Sequence[Client], slo_class: str, settings: WorkerSettings) -> float:
    """Jain's index over a class's tenants of what they got by what was fair to get.

    Counted in the time of workers: by prompts alone, long answers would be free, and by requests
    long prompts, too.
    """
    asked: defaultdict[str, float] = defaultdict(float)
    got: defaultdict[str, float] = defaultdict(float)
    for client in clients:
        if client.slo_class == slo_class:
            work_s = settings.work_s(client.tokens, client.output_tokens)
            asked[client.tenant_id] += work_s
            got[client.tenant_id] += work_s * outcome_of(client).startswith(IN_TIME)
    names = list(asked)
    fair = max_min_shares([asked[name] for name in names], sum(got.values()))
    return jain(got[name] / share for name, share in zip(names, fair, strict=True) if share)


def _inversions(play: Play, refused_at: Sequence[tuple[float, str]]) -> int:
    """Critical refusals with a sheddable admission in the 100 ms before them."""
    admitted = sorted(
        client.admitted_at
        for client in play.clients
        if client.admitted_at is not None and client.slo_class in SHEDDABLE
    )
    count = 0
    for at, slo_class in refused_at:
        if slo_class == "critical":
            first = bisect_left(admitted, at - INVERSION_WINDOW_S)
            count += first < len(admitted) and admitted[first] <= at
    return count
