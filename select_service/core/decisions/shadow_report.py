"""The results of a shadow policy: sums over partitions, by scope and in total."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from select_service.core.decisions.shadow_regret import ShadowTally
from select_service.types.shadow import (
    ShadowChoices,
    ShadowMean,
    ShadowNumbers,
    ShadowRegret,
    ShadowScope,
    ShadowStatus,
    ShadowWeights,
)

if TYPE_CHECKING:
    from indexer.types import Scope
    from select_service.core.decisions.shadow import Shadowing
    from select_service.core.decisions.shadow_regret import RegretTally, SideTally


class ShadowReport:
    """Builds one answer, scope by scope."""

    def __init__(self, shadowing: Shadowing, scopes_max: int) -> None:
        self._shadowing = shadowing
        self._scopes_max = scopes_max
        self._scopes: list[ShadowScope] = []
        self._scopes_total = 0
        self._total = ShadowTally()

    def add(self, scope: Scope, tally: ShadowTally | None) -> None:
        """Add a scope: to the total, and singly if there is room."""
        tally = tally or ShadowTally()
        self._total.add(tally)
        self._scopes_total += 1
        if len(self._scopes) < self._scopes_max:
            self._scopes.append(ShadowScope(**scope._asdict(), numbers=_numbers(tally)))

    def status(self, now: float, *, with_cost: bool) -> ShadowStatus:
        """Return the answer.

        Args:
            now: monotonic seconds.
            with_cost: include its time, which only the operator of the process may see.
        """
        shadow, live = self._shadowing.shadow, ShadowWeights(**self._shadowing.live._asdict())
        cost_s = self._shadowing.budget.spent_s if with_cost else UNSET
        if shadow is None:
            return ShadowStatus(
                enabled=False, live_weights=live, shadow_weights=None, cost_s=cost_s
            )
        return ShadowStatus(
            enabled=True,
            live_weights=live,
            shadow_weights=ShadowWeights(**shadow.weights._asdict()),
            sample=shadow.settings.sample,
            cost_max=shadow.settings.cost_max,
            since_s=now - shadow.since,
            cost_s=cost_s,
            total=_numbers(self._total),
            scopes=self._scopes,
            scopes_total=self._scopes_total,
        )


def _numbers(tally: ShadowTally) -> ShadowNumbers:
    scored = tally.scored
    return ShadowNumbers(
        scored=scored,
        agreed=tally.agreed,
        agreement=tally.agreed / scored if scored else None,
        skipped=dict(sorted(tally.skipped.items())),
        regret_by_live_weights=_regret(tally.regret_live, scored),
        regret_by_shadow_weights=_regret(tally.regret_shadow, scored),
        choices=_choices(_mean(tally.live, scored), _mean(tally.shadow, scored))
        if scored
        else None,
    )


def _regret(tally: RegretTally, scored: int) -> ShadowRegret:
    mean = tally.total / scored if scored else None
    return ShadowRegret(total=tally.total, mean=mean, counts=tally.counts)


def _mean(side: SideTally, scored: int) -> ShadowMean:
    return ShadowMean(
        prefill_tokens=side.prefill_tokens / scored,
        cached_tokens=side.cached_tokens / scored,
        queued_prefill_tokens=side.queued_prefill_tokens / scored,
        decode_blocks=side.decode_blocks / scored,
    )


def _choices(live: ShadowMean, shadow: ShadowMean) -> ShadowChoices:
    gain = ShadowMean(
        prefill_tokens=live.prefill_tokens - shadow.prefill_tokens,
        cached_tokens=shadow.cached_tokens - live.cached_tokens,
        queued_prefill_tokens=live.queued_prefill_tokens - shadow.queued_prefill_tokens,
        decode_blocks=live.decode_blocks - shadow.decode_blocks,
    )
    return ShadowChoices(live=live, shadow=shadow, gain=gain)
