"""The counters of the demo, and the verdict at its end.

`session.py` fills the counters, `view.py` reads them. The verdict requires what must be true of a
working selector whatever the traffic was: loads return to zero, every request was served, and what
the service believes about the caches is what the engines hold.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_DECISIONS_SHOWN = 8
PREDICTION_ERROR_MAX = 0.25
"""Limit of the total prediction error, as a share of the blocks really reused. A few per cent are
natural: a prompt is predicted when it is placed, and by the time the engine admits it others may
have brought or evicted blocks."""


@dataclass(frozen=True, slots=True)
class DecisionLine:
    """One line of the list of recent decisions."""

    request_id: str
    worker_id: int
    prompt_blocks: int
    predicted_blocks: int
    latency_s: float


@dataclass(slots=True)
class WorkerTally:
    """Blocks requested from, predicted for and really reused by one worker."""

    requests: int = 0
    prompt_blocks: int = 0
    predicted_blocks: int = 0
    actual_blocks: int = 0
    error_blocks: int = 0  # sum of |predicted - actual| over the requests


@dataclass(slots=True)
class DemoStats:
    """Counters of a run."""

    latencies_s: list[float] = field(default_factory=list)
    tallies: dict[int, WorkerTally] = field(default_factory=dict)
    decisions: deque[DecisionLine] = field(default_factory=lambda: deque(maxlen=_DECISIONS_SHOWN))
    issued: int = 0
    finished: int = 0
    lost: int = 0  # attempts that ended with their engine and were placed again
    failed: int = 0  # requests given up
    first_failure: str | None = None

    def decided(self, decision: DecisionLine) -> None:
        """Record an answer of /select_and_reserve."""
        self.latencies_s.append(decision.latency_s)
        self.decisions.append(decision)

    def prefilled(self, worker_id: int, prompt: int, predicted: int, actual: int) -> None:
        """Record what an engine really reused, in blocks."""
        tally = self.tallies.setdefault(worker_id, WorkerTally())
        tally.requests += 1
        tally.prompt_blocks += prompt
        tally.predicted_blocks += predicted
        tally.actual_blocks += actual
        tally.error_blocks += abs(predicted - actual)

    def gave_up(self, reason: str) -> None:
        """Record a request that could not be served."""
        self.failed += 1
        if self.first_failure is None:
            self.first_failure = reason

    def total(self) -> WorkerTally:
        """Return the sum over all workers."""
        names = ("requests", "prompt_blocks", "predicted_blocks", "actual_blocks", "error_blocks")
        return WorkerTally(
            *(sum(getattr(tally, name) for tally in self.tallies.values()) for name in names)
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a run."""

    requests: int
    finished: int
    lost: int
    failed: int
    first_failure: str | None
    seconds: float
    hit_rate_actual: float
    hit_rate_predicted: float
    prediction_error: float  # as a share of the blocks really reused
    latency_p50_s: float
    latency_p99_s: float
    batches_published: int
    blocks_stored: int
    blocks_removed: int
    replays_served: int
    restarts: int
    load_left: str | None  # what /loads still shows, None when it is back to zero
    audit_checks: int  # at the end: each of the last prompts against the cache of each engine
    audit_wrong: int

    def problems(self) -> list[str]:
        """Return why this run was not a success; empty if it was."""
        found = []
        if self.load_left is not None:
            found.append(f"load did not return to zero: {self.load_left}")
        if self.failed:
            found.append(f"{self.failed} requests were not served: {self.first_failure}")
        if self.prediction_error > PREDICTION_ERROR_MAX:
            found.append(f"predictions are off by {self.prediction_error:.0%} of the reused blocks")
        if self.audit_wrong:
            found.append(
                f"the index is wrong in {self.audit_wrong} of {self.audit_checks} checks of what"
                " an engine has cached of a prompt"
            )
        return found

    def lines(self) -> list[str]:
        """Return the summary as text."""
        per_second = self.requests / self.seconds if self.seconds else 0.0
        verdict = self.problems()
        return [
            f"requests       {self.finished} of {self.requests} finished in {self.seconds:.1f} s"
            f" ({per_second:.1f}/s), {self.lost} placed again after a restart",
            f"hit rate       {self.hit_rate_actual:.1%} of prompt blocks reused,"
            f" {self.hit_rate_predicted:.1%} predicted",
            f"prediction     off by {self.prediction_error:.1%} of the reused blocks,"
            f" summed per request",
            f"index audit    {self.audit_checks - self.audit_wrong} of {self.audit_checks}"
            f" right: how much of each of the last prompts each engine has cached",
            f"selection      p50 {self.latency_p50_s * 1e3:.1f} ms, p99"
            f" {self.latency_p99_s * 1e3:.1f} ms, seen by the client",
            f"events         {self.batches_published} batches: {self.blocks_stored} blocks stored,"
            f" {self.blocks_removed} removed; missed ones sent again {self.replays_served} times",
            f"restarts       {self.restarts}",
            f"load           {'back to zero' if self.load_left is None else self.load_left}",
            f"verdict        {'; '.join(verdict) if verdict else 'ok'}",
        ]


def percentile(values: list[float], fraction: float) -> float:
    """Return the value below which `fraction` of `values` lie (nearest rank); 0 if none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
