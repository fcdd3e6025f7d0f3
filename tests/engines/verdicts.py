"""What the service foretold, beside what the engines found; why they differ, where they do.

A prediction is made before an engine looks into its cache. What other requests do to the cache
until then, nobody can foresee: those differences have a name, and all others are the service's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.engines.event_log import EventLog, blocks_of
from tests.engines.exchange import Exchange

AFTER_S: Final = 5.0
"""An engine answers before it publishes what it stored; on a busy machine, long before."""

EVICTED: Final = "evicted meanwhile"
STORED: Final = "stored meanwhile"
UNEXPLAINED: Final = "unexplained"


@dataclass
class Verdict:
    """One row of the table at the end."""

    model: str
    config: str
    what: str
    equal: int = 0
    too_much: list[int] = field(default_factory=list)
    too_little: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    cached: int = 0
    """Tokens that the engines found, of all requests."""
    note: str = ""

    @property
    def requests(self) -> int:
        return self.equal + len(self.too_much) + len(self.too_little)

    @property
    def share(self) -> float:
        return self.equal / max(self.requests, 1)

    @property
    def unexplained(self) -> int:
        return self.reasons[UNEXPLAINED]

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.reasons.items()))
        notes = "; ".join(one for one in (reasons, self.note) if one)
        return (
            f"{self.model:<10} {self.what:<28} {self.config:<36} {self.requests:5} {self.equal:6}"
            f" {len(self.too_much):4} {_mean(self.too_much):7.0f}"
            f" {len(self.too_little):4} {_mean(self.too_little):7.0f}  {notes}".rstrip()
        )


def judge(
    verdict: Verdict, exchanges: Sequence[Exchange], block_size: int, log: EventLog
) -> Verdict:
    """Count the exchanges into the verdict, and name the reason of each difference."""
    for exchange in exchanges:
        if exchange.cached is None:
            continue
        verdict.cached += exchange.cached
        error = exchange.foretold - exchange.cached
        if error == 0:
            verdict.equal += 1
            continue
        wrong = verdict.too_much if error > 0 else verdict.too_little
        wrong.append(error)
        reason = _reason(exchange, exchange.cached // block_size, block_size, log)
        verdict.reasons[reason] += 1
        verdict.differences.append(
            f"{reason}: {len(exchange.prompt)} tokens to {exchange.worker_id}.{exchange.rank}"
            f" {exchange.flavor}: foretold {exchange.foretold}, found {exchange.cached};"
            f" {_history(exchange, exchange.cached // block_size, block_size, log)}"
        )
        verdict.differences += [f"    {line}" for line in exchange.evidence]
    return verdict


def _reason(exchange: Exchange, found: int, block_size: int, log: EventLog) -> str:
    rank = (exchange.worker_id, exchange.rank)
    span = (exchange.begun, exchange.ended + AFTER_S)
    blocks = blocks_of(exchange.prompt, block_size)
    foretold = exchange.foretold // block_size
    if foretold > found and log.was_removed(rank, blocks[:foretold], *span):
        return EVICTED
    if foretold < found and log.was_stored(rank, blocks[foretold:found], *span):
        return STORED
    return UNEXPLAINED


def _history(exchange: Exchange, found: int, block_size: int, log: EventLog) -> str:
    """Events of the first and the last block in doubt, in seconds since the selection."""
    rank = (exchange.worker_id, exchange.rank)
    begin, end = sorted((exchange.foretold // block_size, found))
    doubtful = blocks_of(exchange.prompt, block_size)[begin:end]
    if not doubtful:
        return "no block is in doubt"
    return ", ".join(
        f"{name} block {what} at"
        f" {[(round(at - exchange.begun, 2), batch) for at, batch in times.get(block, ())]}"
        for name, block in (("first", doubtful[0]), ("last", doubtful[-1]))
        for what, times in (("stored", log.stored[rank]), ("removed", log.removed[rank]))
    )


def _mean(errors: Sequence[int]) -> float:
    return sum(errors) / len(errors) if errors else 0.0
