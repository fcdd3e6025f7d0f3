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
    missing,
    percent,
    place_text,
    weights_text,
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


def html_of(result: ReplayResult, command_line: str = "") -> str:
    """Return the whole page."""
    body = [f"<p>{escape(_summary(result))}</p>"]
    body.append(table(["what came of it", "decisions"], _outcomes(result)))
    if len(result.course) > 1:
        body.append(_decided(result))
    if result.missing:
        gaps = "".join(f"<li>{escape(missing(gap))}</li>" for gap in result.missing)
        body.append(f"<h2>Missing</h2><ul>{gaps}</ul>")
    if result.first_difference is not None:
        body.append("<h2>The first that is another one now</h2>")
        body.append(_differences([result.first_difference]))
    if result.what_if is not None:
        body += _what_if(result.what_if, result.course)
    about = "In force when the first file began. Every decision is made again with those it met."
    body.append(folded("Settings", about, result.config))
    return page(_title(result), body, verdict=_verdict(result), command_line=command_line)


def _verdict(result: ReplayResult) -> str:
    if result.what_if is not None:
        what_if = result.what_if
        more = what_if.prefill_tokens - what_if.prefill_tokens_recorded
        than = f"{abs(more):,} {'more' if more > 0 else 'fewer'} tokens to prefill"
        return (
            f"With {weights_text(what_if)}, {what_if.changed:,} of {what_if.decisions:,} decisions "
            f"go elsewhere, with {than if more else 'as many tokens to prefill'}."
        )
    others = result.decisions - result.reproduced
    if others:
        return f"{others:,} of {result.decisions:,} decisions are other ones now."
    return f"All {result.decisions:,} decisions are made again as they were recorded."


def _title(result: ReplayResult) -> str:
    named = f"select-sim: replay of {Path(result.files[-1]).name}" if result.files else "select-sim"
    return named if result.what_if is None else f"{named} with {weights_text(result.what_if)}"


def _summary(result: ReplayResult) -> str:
    share = result.reproduced / result.decisions if result.decisions else 1.0
    return (
        f"{counted(len(result.files), 'file')} of select-service "
        f"{', '.join(result.service) or '?'}, "
        f"{result.seconds:,.1f} s: {result.decisions:,} decisions, of which {result.reproduced:,} "
        f"({percent(share)}) are made again as they were"
    )


def _outcomes(result: ReplayResult) -> list[list[str]]:
    counts = {
        _KINDS["placed"]: result.placed,
        _KINDS["pair"]: result.pairs,
        _KINDS["cache_threshold"]: result.cache_thresholds,
        **{f"refused: {code}": count for code, count in sorted(result.refused.items())},
        f"planned in batches ({result.batches:,})": result.batch_members,
    }
    return [[what, f"{count:,}"] for what, count in counts.items() if count]


def _decided(result: ReplayResult) -> str:
    """Plot decisions per second by outcome."""
    kinds = [kind for kind in _KINDS if any(kind in part.decided for part in result.course)]
    series = [
        Series(
            _KINDS[kind],
            [(_middle(part), part.decided.get(kind, 0) / part.length_s) for part in result.course],
        )
        for kind in kinds
    ]
    plot = lines("Decisions over time", series, x="s", y="per second")
    return figure(plot, [one.name for one in series])


def _middle(part: Part) -> float:
    return part.at_s + part.length_s / 2


# -- with other weights ----------------------------------------------------------------------------


def _what_if(what_if: WhatIf, course: Sequence[Part]) -> list[str]:
    body = [
        f"<h2>What if {escape(weights_text(what_if))}</h2>",
        "<p>Open loop: every decision under the loads and caches it met, which are not those that "
        "these weights would have led to. It shows what changes at once and not where it ends; "
        "that is select-sim run --trace FILE --format recording.</p>",
        f"<p>{escape(_moved(what_if))}</p>",
        table(["all decisions", *_SIDES], _totals(what_if)),
    ]
    if what_if.decisions:
        body += [key(_SIDES), *map(figure, _beside(what_if, course))]
    if what_if.ranks:
        body.append(f"<h2>Ranks</h2>{_ranks(what_if.ranks)}")
    if what_if.examples:
        body.append(f"<h2>The first that go elsewhere</h2>{_differences(what_if.examples)}")
    return body


def _moved(what_if: WhatIf) -> str:
    text = (
        f"{what_if.changed:,} of {what_if.decisions:,} decisions go elsewhere, "
        f"{percent(what_if.agreement)} "
        "stay."
    )
    if what_if.in_session:
        text += f" {what_if.in_session:,} of them stay with their session, as they did."
    if what_if.batch_members:
        moved = f"{what_if.batch_members_moved:,} go elsewhere"
        text += f" Of {what_if.batch_members:,} in batches {moved}."
    return f"{text} CoV: standard deviation over mean, of what ranks were given; 0 is even."


def _totals(what_if: WhatIf) -> list[list[str]]:
    rows = [
        [
            "tokens to prefill",
            f"{what_if.prefill_tokens_recorded:,}",
            f"{what_if.prefill_tokens:,}",
        ],
        ["cached tokens", f"{what_if.cached_tokens_recorded:,}", f"{what_if.cached_tokens:,}"],
    ]
    if what_if.spread_recorded is not None and what_if.spread is not None:
        both = [msgspec.structs.astuple(one) for one in (what_if.spread_recorded, what_if.spread)]
        rows += [
            [name, *(f"{value:.3f}" for value in values)]
            for name, *values in zip(_SPREADS, *both, strict=True)
        ]
    return rows


def _beside(what_if: WhatIf, course: Sequence[Part]) -> list[str]:
    """Plot recorded values beside those of other weights, in total and over time."""
    totals = [what_if.prefill_tokens_recorded, what_if.prefill_tokens]
    plots = [bars("Tokens to prefill", _SIDES, totals, x="tokens"), _cdf(what_if.sizes)]
    if what_if.spread_recorded is not None and what_if.spread is not None:
        covs = [what_if.spread_recorded.requests_cov, what_if.spread.requests_cov]
        plots.append(bars("Spread of requests over ranks", _SIDES, covs, x="CoV"))
    if len(what_if.ranks) > 1:
        plots.append(_busiest("Requests by rank", what_if.ranks, "requests"))
        plots.append(_busiest("Tokens to prefill by rank", what_if.ranks, "prefill_tokens"))
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
            place_text(one.recorded),
            place_text(one.replayed),
        ]
        for one in found
    ]
    return table(names, rows)
