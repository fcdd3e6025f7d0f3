"""A self-contained HTML page of a comparison: a table, plots, the settings."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import TYPE_CHECKING

from select_service.simulator.comparison import Comparison, by_policy, differences, legend, verdict
from select_service.simulator.comparison import table as comparison_table
from select_service.simulator.page import figure, folded, key, page, table
from select_service.simulator.plots import Series, bars, lines, stacked
from select_service.simulator.statistics import estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from select_service.simulator.core.measures import Distribution, Measures


def html_of(result: Comparison, command_line: str = "") -> str:
    """Return the whole page."""
    groups = by_policy(result.runs)
    settings = result.settings
    what = settings.trace.path if settings.trace else _named(one.kind for one in settings.workloads)
    body = [
        f"<p>{escape(_summary(result, groups))}</p>",
        table(*comparison_table(result.runs)),
        "<p>Means over seeds ± 95 % of Student's t; one seed has no interval. "
        + escape(". ".join(f"{name}: {meaning}" for name, meaning in legend(result).items()))
        + ".</p>",
        *_differences(result.runs),
        key(groups),
        *map(figure, _plots(groups)),
        "<p>Distributions and what is drawn over time are of the first run of each policy.</p>",
        "<h2>Decisions by reason</h2>",
        *_reasons(groups),
        "<h2>Ends</h2>",
        table(["policy", "end", "requests"], _ends(groups)),
        folded("Settings", "Of the first run; others differ in policy and seed.", settings),
    ]
    title = f"select-sim: {_named(groups)} on {what}"
    return page(title, body, verdict=verdict(result.runs), command_line=command_line)


def _differences(runs: Sequence[Measures]) -> list[str]:
    """Return how each policy differs from one of them, where there are several."""
    head, rows = differences(runs)
    if not rows:
        return []
    return [
        table(head, rows),
        "<p>Differences on the same requests ± 95 %: over seeds, or with one seed over its "
        "twentieths for what is a mean. In time: percentage points.</p>",
    ]


def _named(names: Iterable[str]) -> str:
    """Return a short name, to distinguish pages."""
    first, *others = names
    return f"{first} and {len(others)} more" if len(others) > 1 else ", ".join([first, *others])


def _summary(result: Comparison, groups: Mapping[str, Sequence[Measures]]) -> str:
    one = result.runs[0]
    seeds = max(len(group) for group in groups.values())
    runs = "one run" if seeds == 1 else f"{seeds} runs"
    text = (
        f"{one.requests:,} requests, {one.workers} workers, {runs} of each policy; "
        f"select-service {result.version}"
    )
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
        bars("Hit rate and ceiling", [*names, "ceiling"], [*hits, ceiling], x="% of tokens")
    )
    covs = [estimate([one.load_cov for one in group]).mean for group in groups.values()]
    plots.append(bars("Spread of load over workers", names, covs, x="CoV of requests"))
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


def _reasons(groups: Mapping[str, Sequence[Measures]]) -> list[str]:
    """Return a plot of the shares, and a table of the numbers; some policies have no reasons."""
    counts: dict[str, Counter[str]] = {}
    for name, group in groups.items():
        counts[name] = sum((Counter(one.reasons) for one in group), Counter[str]())
    named = sorted({reason for one in counts.values() for reason in one if reason})
    rows = [
        [name, *[f"{counter[reason]:,}" if any(counter) else "-" for reason in named]]
        for name, counter in counts.items()
    ]
    parts = [table(["policy", *named], rows)]
    with_reasons = {name: counter for name, counter in counts.items() if any(counter)}
    if with_reasons:
        layers = [
            (reason, [100 * one[reason] / one.total() for one in with_reasons.values()])
            for reason in named
        ]
        plot = stacked("Decisions by reason", list(with_reasons), layers, x="% of decisions")
        parts.insert(0, figure(plot, named, filled=True))
    return parts


def _ends(groups: Mapping[str, Sequence[Measures]]) -> list[list[str]]:
    rows = []
    for name, group in groups.items():
        ends = sum((Counter(one.ends) for one in group), Counter[str]())
        rows += [[name, end, f"{number:,}"] for end, number in sorted(ends.items())]
    return rows
