"""One HTML page of a comparison: a table, plots, the settings; it needs nothing but a browser."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import TYPE_CHECKING

import msgspec

from select_service.simulator.comparison import Comparison, by_policy, table
from select_service.simulator.plots import COLOURS, Series, bars, lines
from select_service.simulator.statistics import estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from select_service.simulator.core.measures import Distribution, Measures

__all__ = ["html_of"]

_STYLE = (
    "body{font:14px sans-serif;margin:2em;color:#222}table{border-collapse:collapse;margin:1em 0}"
    "th,td{padding:.25em .7em;text-align:right;border-bottom:1px solid #ddd}"
    "th:first-child,td:first-child{text-align:left}pre{background:#f6f6f6;padding:1em;"
    "white-space:pre-wrap}figure{display:inline-block;margin:0 1em 1em 0}"
    ".key span{margin-right:1.2em;white-space:nowrap}.key i{display:inline-block;width:1em;"
    "height:.7em;margin-right:.35em}"
)


def html_of(result: Comparison) -> str:
    """Return the whole page."""
    groups = by_policy(result.runs)
    head, rows = table(result.runs)
    settings = msgspec.json.format(msgspec.json.encode(result.settings), indent=2).decode()
    body = [
        "<h1>select-sim</h1>",
        f"<p>{escape(_summary(result, groups))}</p>",
        _table(head, rows),
        "<p>Means over seeds ± 95 % of Student's t; one seed has no interval. The ceiling is the "
        "hit rate of one infinite cache for all.</p>",
        _key([*groups, "ceiling"]),
        *(f"<figure>{plot}</figure>" for plot in _plots(groups)),
        "<h2>Decisions by reason</h2>",
        _reasons(groups),
        "<h2>Ends</h2>",
        _table(["policy", "end", "requests"], _ends(groups)),
        f"<h2>Settings</h2><pre>{escape(settings)}</pre>",
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>select-sim</title>'
        f"<style>{_STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _summary(result: Comparison, groups: Mapping[str, Sequence[Measures]]) -> str:
    one = result.runs[0]
    seeds = max(len(group) for group in groups.values())
    text = f"{one.requests} requests, {one.workers} workers, {seeds} seed(s), {result.version}"
    if result.capacity is not None and result.load is not None:
        text += f"; {result.load:g} of the measured capacity of {result.capacity:.2f} requests/s"
    return text


def _plots(groups: Mapping[str, Sequence[Measures]]) -> list[str]:
    names = list(groups)
    plots = [
        _cdf("Time to first token", groups, lambda one: one.ttft_s),
        _cdf("Between two tokens", groups, lambda one: one.gap_s),
        _cdf("From arrival to last token", groups, lambda one: one.e2e_s),
    ]
    hits = [estimate([one.hit_rate * 100 for one in group]).mean for group in groups.values()]
    ceiling = max(one.hit_ceiling for group in groups.values() for one in group) * 100
    plots.append(
        bars("Hit rate and ceiling", [*names, "ceiling"], [*hits, ceiling], y="% of tokens")
    )
    covs = [estimate([one.load_cov for one in group]).mean for group in groups.values()]
    plots.append(bars("Spread of load over workers", names, covs, y="CoV of requests"))
    over_time = [Series(name, group[0].load_over_time) for name, group in groups.items()]
    plots.append(lines("Spread of load over time", over_time, x="s", y="CoV of tokens"))
    classes = sorted({row.slo_class for group in groups.values() for row in group[0].slo})
    for slo_class in classes:
        series = [
            Series(name, row.over_time)
            for name, group in groups.items()
            for row in group[0].slo
            if row.slo_class == slo_class
        ]
        title = f"SLO attainment, class {slo_class}"
        plots.append(lines(title, series, x="s", y="share in time", most=1.0))
    return plots


def _cdf(
    title: str, groups: Mapping[str, Sequence[Measures]], read: Callable[[Measures], Distribution]
) -> str:
    series = [
        Series(name, [(at * 1e3, share) for at, share in read(group[0]).curve if at > 0.0])
        for name, group in groups.items()
    ]
    return lines(title, series, x="ms", y="share", log_x=True, most=1.0)


def _key(names: Sequence[str]) -> str:
    spans = (
        f'<span><i style="background:{COLOURS[at % len(COLOURS)]}"></i>{escape(name)}</span>'
        for at, name in enumerate(names)
    )
    return f'<p class="key">{"".join(spans)}</p>'


def _reasons(groups: Mapping[str, Sequence[Measures]]) -> str:
    counts: dict[str, Counter[str]] = {}
    for name, group in groups.items():
        counts[name] = sum((Counter(one.reasons) for one in group), Counter[str]())
    named = sorted({reason for one in counts.values() for reason in one if reason})
    rows = [[name, *(str(counter[reason]) for reason in named)] for name, counter in counts.items()]
    return _table(["policy", *named], rows)


def _ends(groups: Mapping[str, Sequence[Measures]]) -> list[list[str]]:
    rows = []
    for name, group in groups.items():
        ends = sum((Counter(one.ends) for one in group), Counter[str]())
        rows += [[name, end, str(number)] for end, number in sorted(ends.items())]
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines_of = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
    lines_of += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table>{''.join(lines_of)}</table>"
