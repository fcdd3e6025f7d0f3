"""How long pulling KV blocks takes, learnt from first tokens: a line over blocks for each path.

A path is the topology domain by which the two ranks are connected, and the tier of the last block.
What a first token took beyond computing the rest of the prompt was the pull, if its rank had
nothing else to compute: neither before it nor after. The line is that of `rank_speeds.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.core.ledger.rank_speeds import SURE, Fit, PredictionError

if TYPE_CHECKING:
    from select_service.core.ledger.rank_speeds import RankSpeeds
    from select_service.types import KvTier

ANYWHERE: Final = ""
"""The domain of all ranks, and of a shared store."""


PATHS_MAX: Final = 256
"""Paths measured of one ledger; workers name domains, too. Others cost what is set."""


class PullPath(NamedTuple):
    """What blocks move through."""

    domain: str  # by which two ranks are connected
    tier: KvTier  # of the last block


class PullSpeed:
    """What one path was measured to take; times in seconds."""

    __slots__ = ("blocks", "error", "line", "seconds")

    def __init__(self) -> None:
        self.line = Fit()
        """Time of a pull over its blocks."""
        self.error = PredictionError()
        """Of what the line said before."""
        self.blocks, self.seconds = 0, 0.0  # in all


class PullSpeeds:
    """The paths of one ledger that were measured, by domain and tier: the first `PATHS_MAX`."""

    __slots__ = ("_ranks", "by_path")

    def __init__(self, ranks: RankSpeeds) -> None:
        self._ranks = ranks
        self.by_path: dict[PullPath, PullSpeed] = {}

    def pulled(self, slot: int, path: PullPath, blocks: int, tokens: int, seconds: float) -> None:
        """Note a first token that waited for nothing else.

        `tokens` is what the rank computed itself; `seconds` are since it was booked.
        """
        rank = self._ranks.by_slot.get(slot)
        alone_s = None if rank is None else rank.ttft.at(tokens)
        known = self.by_path.get(path)
        # no time passes where a clock went back
        if alone_s is None or seconds <= 0.0 or (known is None and len(self.by_path) >= PATHS_MAX):
            return
        if known is None:
            known = self.by_path[path] = PullSpeed()
        pull_s, expected_s = max(0.0, seconds - alone_s), known.line.at(blocks)
        if expected_s is not None:
            known.error.learn(expected_s, pull_s)
        known.line.learn(blocks, pull_s)
        known.blocks += blocks
        known.seconds += pull_s

    def cost(self, path: PullPath, block_size: int) -> tuple[float, float] | None:
        """Return what any pull costs and what each block adds, in blocks of prefill of a mean rank.

        The same for every rank, because prices count a block alike on all of them: in blocks of
        its own a slow one would seem to pull for less. None: it was measured too seldom, or no
        rank's speed is known.
        """
        known, rate = self.by_path.get(path), self._ranks.mean_tokens_per_s
        if known is None or known.line.samples < SURE or rate is None:
            return None
        each = rate / block_size
        return known.line.base * each, known.line.slope * each
