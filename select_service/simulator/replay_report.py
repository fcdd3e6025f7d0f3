"""An HTML page of a replay: its decisions, the reproduced share, and what other weights change."""

from __future__ import annotations

from html import escape
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from select_service.simulator.page import figure, folded, key, page, table
from select_service.simulator.plots import Series, bars, lines
from select_service.simulator.replay_text import (
    counted,
    in_words,
    missing,
    percent,
    weights_in_words,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.simulator.replay_findings import (
        RankWork,
        ReplayDifference,
        ReplayResult,
        WhatIf,
    )
    from select_service.simulator.time_series import Part

ROWS_MAX: Final = 20
"""Ranks in the table: those with the largest changes. The JSON has all of them."""

_SIDES: Final = ("recorded", "what if")
_WORK: Final = ("requests", "tokens to prefill")
_CHOICES: Final = ("recorded", "now")
_SPREADS: Final = tuple(
    f"{what} by rank, {how}" for what in _WORK for how in ("CoV", "most over mean")
)
_KINDS: Final = {
    "placed": "placed",
    "pair": "pairs",
    "cache_threshold": "below the cache threshold",
    "refused": "refused",
}


def html_of(told: ReplayResult, command_line: str = "") -> str:
    """Return the whole page."""
    body = [f"<p>{escape(_summary(told))}</p>"]
    body.append(table(["what came of it", "decisions"], _outcomes(told)))
    if len(told.course) > 1:
        body.append(_decided(told))
    if told.missing:
        gaps = "".join(f"<li>{escape(missing(gap))}</li>" for gap in told.missing)
        body.append(f"<h2>Missing</h2><ul>{gaps}</ul>")
    if told.first_difference is not None:
        body.append("<h2>The first that is another one now</h2>")
        body.append(_differences([told.first_difference]))
    if told.what_if is not None:
        body += _what_if(told.what_if, told.course)
    about = "In force when the first file began. Every decision is made again with those it met."
    body.append(folded("Settings", about, told.config))
    return page(_title(told), body, verdict=_verdict(told), command_line=command_line)


def _verdict(told: ReplayResult) -> str:
    if told.what_if is not None:
        moved = told.what_if
        more = moved.prefill_tokens - moved.prefill_tokens_recorded
        than = f"{abs(more):,} {'more' if more > 0 else 'fewer'} tokens to prefill"
        return (
            f"With {weights_in_words(moved)}, {moved.changed:,} of {moved.decisions:,} decisions "
            f"go elsewhere, with {than if more else 'as many tokens to prefill'}."
        )
    others = told.decisions - told.reproduced
    if others:
        return f"{others:,} of {told.decisions:,} decisions are other ones now."
    return f"All {told.decisions:,} decisions are made again as they were recorded."


def _title(told: ReplayResult) -> str:
    named = f"select-sim: replay of {Path(told.files[-1]).name}" if told.files else "select-sim"
    return named if told.what_if is None else f"{named} with {weights_in_words(told.what_if)}"


def _summary(told: ReplayResult) -> str:
    share = told.reproduced / told.decisions if told.decisions else 1.0
    return (
        f"{counted(len(told.files), 'file')} of select-service {', '.join(told.service) or '?'}, "
        f"{told.seconds:,.1f} s: {told.decisions:,} decisions, of which {told.reproduced:,} "
        f"({percent(share)}) are made again as they were"
    )


def _outcomes(told: ReplayResult) -> list[list[str]]:
    counts = {
        _KINDS["placed"]: told.placed,
        _KINDS["pair"]: told.pairs,
        _KINDS["cache_threshold"]: told.cache_thresholds,
        **{f"refused: {code}": count for code, count in sorted(told.refused.items())},
        f"planned in batches ({told.batches:,})": told.batch_members,
    }
    return [[what, f"{count:,}"] for what, count in counts.items() if count]


def _decided(told: ReplayResult) -> str:
    """Plot decisions per second by outcome."""
    kinds = [kind for kind in _KINDS if any(kind in part.decided for part in told.course)]
    series = [
        Series(
            _KINDS[kind],
            [(_middle(part), part.decided.get(kind, 0) / part.length_s) for part in told.course],
        )
        for kind in kinds
    ]
    plot = lines("Decisions over time", series, x="s", y="per second")
    return figure(plot, [one.name for one in series])


def _middle(part: Part) -> float:
    return part.at_s + part.length_s / 2


# -- with other weights ----------------------------------------------------------------------------


def _what_if(told: WhatIf, course: Sequence[Part]) -> list[str]:
    body = [
        f"<h2>What if {escape(weights_in_words(told))}</h2>",
        "<p>Open loop: every decision under the loads and caches it met, which are not those that "
        "these weights would have led to. It tells what changes at once and not where it ends; "
        "that is select-sim run --trace FILE --format recording.</p>",
        f"<p>{escape(_moved(told))}</p>",
        table(["all decisions", *_SIDES], _totals(told)),
    ]
    if told.decisions:
        body += [key(_SIDES), *map(figure, _beside(told, course))]
    if told.ranks:
        body.append(f"<h2>Ranks</h2>{_ranks(told.ranks)}")
    if told.examples:
        body.append(f"<h2>The first that go elsewhere</h2>{_differences(told.examples)}")
    return body


def _moved(told: WhatIf) -> str:
    text = (
        f"{told.changed:,} of {told.decisions:,} decisions go elsewhere, {percent(told.agreement)} "
        "stay."
    )
    if told.in_session:
        text += f" {told.in_session:,} of them stay with their session, as they did."
    if told.batch_members:
        text += f" Of {told.batch_members:,} in batches {told.batch_members_moved:,} go elsewhere."
    return f"{text} CoV: standard deviation over mean, of what ranks were given; 0 is even."


def _totals(told: WhatIf) -> list[list[str]]:
    rows = [
        ["tokens to prefill", f"{told.prefill_tokens_recorded:,}", f"{told.prefill_tokens:,}"],
        ["cached tokens", f"{told.cached_tokens_recorded:,}", f"{told.cached_tokens:,}"],
    ]
    if told.spread_recorded is not None and told.spread is not None:
        both = [msgspec.structs.astuple(one) for one in (told.spread_recorded, told.spread)]
        rows += [
            [name, *(f"{value:.3f}" for value in values)]
            for name, *values in zip(_SPREADS, *both, strict=True)
        ]
    return rows


def _beside(told: WhatIf, course: Sequence[Part]) -> list[str]:
    """Plot recorded values beside those of other weights, in total and over time."""
    totals = [told.prefill_tokens_recorded, told.prefill_tokens]
    plots = [bars("Tokens to prefill", _SIDES, totals, x="tokens"), _cdf(told.sizes)]
    if told.spread_recorded is not None and told.spread is not None:
        covs = [told.spread_recorded.requests_cov, told.spread.requests_cov]
        plots.append(bars("Spread of requests over ranks", _SIDES, covs, x="CoV"))
    if len(told.ranks) > 1:
        plots.append(_busiest("Requests by rank", told.ranks, "requests"))
        plots.append(_busiest("Tokens to prefill by rank", told.ranks, "prefill_tokens"))
    asked = [part for part in course if part.compared]
    if len(asked) > 1:
        plots += _over_time(asked)
    return plots


def _cdf(sizes: Sequence[tuple[int, int, int]]) -> str:
    """Plot the share of requests with at most that many tokens to prefill."""
    series = []
    for side, name in enumerate(_SIDES, 1):
        shares = accumulate(one[side] for one in sizes)
        total = max(1, sum(one[side] for one in sizes))
        points = [(float(one[0]), below / total) for one, below in zip(sizes, shares, strict=True)]
        series.append(Series(name, [point for point in points if point[0] > 0.0]))
    title = "Tokens to prefill of a request"
    return lines(title, series, x="tokens", y="share", log_x=True, most=1.0)


def _busiest(title: str, ranks: Sequence[RankWork], member: str) -> str:
    """Plot the work of ranks, each side's busiest first."""
    series = []
    for name, read in zip(_SIDES, (f"{member}_recorded", member), strict=True):
        work = sorted((float(getattr(one, read)) for one in ranks), reverse=True)
        series.append(Series(name, [(float(at), each) for at, each in enumerate(work, 1)]))
    return lines(title, series, x="ranks, busiest first", y="each", is_count=True)


def _over_time(asked: Sequence[Part]) -> list[str]:
    cached = []
    for name, member in zip(_SIDES, ("prefill_tokens_recorded", "prefill_tokens"), strict=True):
        shares = [
            (_middle(part), 100.0 * (1.0 - getattr(part, member) / part.prompt_tokens))
            for part in asked
            if part.prompt_tokens
        ]
        cached.append(Series(name, shares))
    moved = [(_middle(part), 100.0 * part.changed / part.compared) for part in asked]
    elsewhere = [Series("recorded", []), Series("what if", moved)]
    return [
        lines("Cached, over time", cached, x="s", y="% of tokens", most=100.0),
        lines("Elsewhere, over time", elsewhere, x="s", y="% of decisions", most=100.0),
    ]


def _ranks(ranks: Sequence[RankWork]) -> str:
    """Show the ranks whose requests change most."""
    order = sorted(ranks, key=lambda one: -abs(one.requests - one.requests_recorded))
    rows = [
        [
            f"{one.worker_id}, rank {one.dp_rank}",
            one.model_name,
            one.tenant_id,
            f"{one.requests_recorded:,}",
            f"{one.requests:,}",
            f"{one.prefill_tokens_recorded:,}",
            f"{one.prefill_tokens:,}",
        ]
        for one in order[:ROWS_MAX]
    ]
    names = ["worker", "model", "tenant", *[f"{what}, {side}" for what in _WORK for side in _SIDES]]
    more = len(order) - len(rows)
    left = f"<p>And {more:,} more, that change less; --out has all.</p>" if more else ""
    return table(names, rows) + left


def _differences(found: Sequence[ReplayDifference]) -> str:
    names = ["decision", "after s", "model", "tenant", "tokens", "among", *_CHOICES]
    rows = [
        [
            " ".join(filter(None, (str(one.decision), one.reservation_id, one.selection_id))),
            f"{one.at_s:,.3f}",
            one.model_name,
            one.tenant_id,
            f"{one.isl_tokens:,}",
            f"{one.candidates:,}",
            in_words(one.recorded),
            in_words(one.replayed),
        ]
        for one in found
    ]
    return table(names, rows)
