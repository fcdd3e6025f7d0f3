"""A second set of weights that scores live traffic and acts on nothing.

For a sample of decisions it prices the same candidates at the same moment, and records which one it
would have chosen and the cost of either choice by either weights. It draws nothing from the
service's generator and changes nothing that decides, so decisions are the same with and without it.
It is open-loop: the loads it sees result from the live choices. `routing/place.py` calls it.
"""

from __future__ import annotations

import math
from copy import copy
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from select_service.core.decisions.shadow_regret import ShadowTally, Side, Sighting
from select_service.core.pricing.cost import Size
from select_service.core.pricing.pick import pick
from select_service.core.pricing.weights import weights_in_force
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
    import random
    from collections.abc import Callable, Mapping

    from indexer.core.tiers import Matches
    from indexer.types import Scope
    from select_service.core.admission.queue import Ticket
    from select_service.core.columns import Floats, Rows
    from select_service.core.decisions.shadow_regret import RegretTally, SideTally
    from select_service.core.partition import Partition
    from select_service.core.pricing.cost import Terms
    from select_service.core.pricing.placement import Placement
    from select_service.core.pricing.weights import Weights
    from select_service.types import RouterConfig
    from select_service.types.shadow import ShadowSettings

BURST_S: Final = 1.0
"""Seconds of budget that may be spent at once: requests come in bursts."""

SKIPPED: Final = ("sample", "budget", "only", "pair", "batch")
"""Why a decision was not scored: it was not sampled; or, if it was: the budget was spent, there was
one candidate, it was about a pair, its rank was chosen for a batch as a whole."""

_STEP: Final = 0.6180339887498949
"""The golden section: its multiples are spread evenly over [0, 1) however many there are, and
follow no period of the traffic. Drawing random numbers would change the live decisions."""


class TimeBudget:
    """A time budget: it accrues at a share of the time that passes, and measured time is deducted.

    Attributes:
        share: Of the time that passes.
        spent_s: In total.
    """

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self._clock = clock
        self.share = 1.0
        self.spent_s = 0.0
        self._left_s = 0.0
        self._filled_at = -math.inf

    def has_any(self, now: float) -> bool:
        """Tell whether any budget is left at this time, in monotonic seconds."""
        left_s = self._left_s + (now - self._filled_at) * self.share
        self._left_s, self._filled_at = min(self.share * BURST_S, left_s), now
        return self._left_s > 0.0

    def began(self) -> float:
        """Return the start time of an operation to be paid."""
        return 0.0 if self._clock is None else self._clock()

    def pay(self, began: float) -> None:
        """Pay for the time since `began`."""
        if self._clock is not None:
            took_s = max(0.0, self._clock() - began)
            self._left_s -= took_s
            self.spent_s += took_s


class ShadowControl:
    """The current shadow weights, and their totals.

    Attributes:
        shadow: None while there is none.
        scored: Decisions since the start of the process, with whatever weights.
        agreed: Of them, those on which both sides agreed.
        live_prefill_tokens: To compute on the chosen ranks, for those decisions' prompts.
        own_prefill_tokens: The same on the ranks the shadow would have chosen.
        budget: The time it may use, and has used.
    """

    def __init__(
        self,
        config: RouterConfig,
        partitions: Mapping[Scope, Partition],
        clock: Callable[[], float] | None,
    ) -> None:
        """Start without a shadow.

        Without a clock (in seconds), its time is neither measured nor limited.
        """
        self._config = config
        self._partitions = partitions
        self.budget = TimeBudget(clock)
        self.live = weights_in_force(config, None)
        self.shadow: Shadow | None = None
        self.scored = 0
        self.agreed = 0
        self.live_prefill_tokens = 0
        self.own_prefill_tokens = 0

    def note(self, seen: Sighting) -> None:
        """Count a scored decision."""
        self.scored += 1
        self.agreed += seen.agrees
        self.live_prefill_tokens += seen.live.prefill_tokens
        self.own_prefill_tokens += seen.shadow.prefill_tokens

    def follow(self, settings: ShadowSettings | None, now: float) -> Shadow | None:
        """Put other settings in force; counts restart if the weights differ."""
        before = self.shadow
        if settings is not None:
            self.budget.share = settings.cost_max
        if settings is None:
            self.shadow = None
        elif before is not None and before.settings.weights == settings.weights:
            before.adjust(settings)
            return before
        else:
            self.shadow = Shadow(self, settings, self._config, now)
        for partition in self._partitions.values():
            partition.shadow_tally = None
        return self.shadow


class Shadow:
    """One set of shadow weights, for as long as it is in force.

    Attributes:
        budget: The time it may use.
        weights: Unless a request overrides them; its override applies to both sides.
        since: When it began.
    """

    def __init__(
        self,
        control: ShadowControl,
        settings: ShadowSettings,
        config: RouterConfig,
        now: float,
    ) -> None:
        self._control = control
        self.budget = control.budget
        self._config = replace(config, **settings.weights)
        self.weights = weights_in_force(self._config, None)
        self.since = now
        self._phase = 0.0
        self._dice: random.Random | None = None
        self.adjust(settings)

    def adjust(self, settings: ShadowSettings) -> None:
        """Change the sampling, with the same weights."""
        self.settings = settings
        self._sample = settings.sample

    def skip(self, ticket: Ticket, why: str) -> None:
        """Count a decision that is not scored."""
        _tally(ticket.partition).skip(why)

    def watch(
        self, ticket: Ticket, rows: Rows, matches: Matches | None, now: float, rng: random.Random
    ) -> ShadowScoring | None:
        """Begin to score a decision before the live choice; None: not this time, and counted.

        `rng`, the generator of the live choice, stays unchanged.
        """
        phase = self._phase + _STEP  # inlined: every decision pays for this much
        self._phase = phase = phase - 1.0 if phase >= 1.0 else phase
        if phase >= self._sample:
            tally = ticket.partition.shadow_tally or _tally(ticket.partition)
            tally.undrawn += 1
        elif ticket.in_batch:
            self.skip(ticket, "batch")
        elif (rows.stop if isinstance(rows, slice) else len(rows)) < 2:  # noqa: PLR2004 - a choice
            self.skip(ticket, "only")
        elif not self.budget.has_any(now):
            self.skip(ticket, "budget")
        else:
            override = ticket.request.router_config_override
            weights = self.weights
            if override is not None:
                weights = weights_in_force(self._config, override)
            if matches is None:
                matches = ticket.partition.match(ticket.prompt)
            dice = None
            if weights.temperature > 0.0:
                dice = self._copied(rng)
            return ShadowScoring(self, ticket, rows, matches, weights, dice, now)
        return None

    def _copied(self, rng: random.Random) -> random.Random:
        """Return a generator in the same state, leaving this one unchanged."""
        began = self.budget.began()
        if self._dice is None:
            self._dice = copy(rng)
        else:
            self._dice.setstate(rng.getstate())
        self.budget.pay(began)
        return self._dice

    def note(self, partition: Partition, seen: Sighting) -> None:
        """Count a scored decision."""
        _tally(partition).note(seen)
        self._control.note(seen)


class ShadowScoring:
    """One decision being scored; to be scored before anything is booked."""

    __slots__ = ("_dice", "_now", "_rows", "_shadow", "_ticket", "_weights", "matches")

    def __init__(  # noqa: PLR0917 - what it looks at
        self,
        shadow: Shadow,
        ticket: Ticket,
        rows: Rows,
        matches: Matches,
        weights: Weights,
        dice: random.Random | None,
        now: float,
    ) -> None:
        self._shadow = shadow
        self._ticket = ticket
        self._rows = rows
        self.matches = matches
        self._weights = weights
        self._dice = dice
        self._now = now

    def score(self, placement: Placement) -> Sighting:
        """Choose among the same candidates with the shadow weights, and compare."""
        began = self._shadow.budget.began()
        sides = self._compare(placement)
        weights = self._ticket.partition.at_present(self._weights)
        sighting = Sighting(weights, *sides)
        self._shadow.note(self._ticket.partition, sighting)
        self._shadow.budget.pay(began)
        return sighting

    def _compare(self, placement: Placement) -> tuple[Side, Side]:
        """Price all candidates with both weights."""
        ticket, rows, slot = self._ticket, self._rows, placement.slot
        partition, prompt = ticket.partition, ticket.prompt
        found = partition.found(prompt, self.matches)
        present = partition.at_present(ticket.weights)
        found = partition.pulling(ticket.request, found, prompt, present)
        terms = partition.terms(prompt, rows, ticket.weights, self._now, found)
        costs = terms.cost
        others = partition.terms(prompt, rows, self._weights, self._now, found).cost
        preference = partition.preference(ticket.request, rows)
        if preference is not None:
            costs, others = costs * preference, others * preference
        live = slot if isinstance(rows, slice) else int(np.flatnonzero(rows == slot)[0])
        own = self._pick(others, live)
        size = Size(prompt.isl_tokens, prompt.blocks, partition.index.block_size)
        seen = size, terms, costs, others
        return _side(live, rows, *seen), _side(own, rows, *seen)

    def _pick(self, costs: Floats, live: int) -> int:
        """Return the position of the shadow's choice: of equals the live one, else the first."""
        if self._dice is not None:
            return pick(costs, self._weights.temperature, self._dice)
        best = int(costs.argmin())
        return live if costs[live] == costs[best] else best


def _tally(partition: Partition) -> ShadowTally:
    if partition.shadow_tally is None:
        partition.shadow_tally = ShadowTally()
    return partition.shadow_tally


def _side(at: int, rows: Rows, size: Size, terms: Terms, costs: Floats, others: Floats) -> Side:
    cached = min(size.isl_tokens, int(terms.cached_tokens[at]))
    return Side(
        at if isinstance(rows, slice) else int(rows[at]),
        float(costs[at]),
        float(others[at]),
        max(0, size.isl_tokens - cached - int(terms.pulled[at]) * size.block_size),
        cached,
        float(terms.prefill[at]),
        float(terms.decode[at]),
    )


class ShadowReport:
    """Builds one answer, scope by scope."""

    def __init__(self, control: ShadowControl, scopes_max: int) -> None:
        self._control = control
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

        Only the operator of the process may see its time (`with_cost`).
        """
        shadow, live = self._control.shadow, ShadowWeights(**self._control.live._asdict())
        cost_s = self._control.budget.spent_s if with_cost else UNSET
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
