"""`python -m bench.compare.plot FILE`: a result as two pictures, for the README.

Bars of ours / peer by row with the targets marked, and CPU per selection over the prompt's length.
Needs the extra `bench` (matplotlib).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.compare.results import NotAResult, last, read
from bench.compare.suite import label
from bench.compare.targets import TARGETS, Verdict
from bench.output import RESULTS, can_draw, progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.compare.results import Result, ResultRow

__all__ = ["Bar", "Line", "bars", "length_lines", "main"]

_COLOURS = {Verdict.MET: "#2a7f62", Verdict.EQUAL: "#c9a227", Verdict.MISSED: "#b5403a"}
_PLAIN = "#777777"
_BAR_INCHES = 0.27


class Bar:
    """One row's ratio, its bracket, and what it should be."""

    def __init__(self, row: ResultRow, pair: str) -> None:
        ratio = row.ratios[pair]
        self.name = row.row
        self.value = ratio.of_medians
        self.bracket = (min(ratio.low, self.value), max(ratio.high, self.value))
        self.target = row.target
        self.colour = _PLAIN if ratio.verdict is None else _COLOURS[Verdict(ratio.verdict)]


class Line:
    """One contender's CPU by prompt length, under one workload."""

    def __init__(self, name: str, contender: str, points: list[tuple[int, float]]) -> None:
        self.name = name
        self.contender = contender
        self.points = points


def bars(result: Result, pair: str) -> list[Bar]:
    """Every row that compares these two, in the order of the file."""
    return [Bar(row, pair) for row in result.rows if pair in row.ratios]


def length_lines(result: Result) -> list[Line]:
    """W1 to W3 at saturation: CPU µs by tokens, a line per workload and contender."""
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in result.rows:
        number, _, length = label(row.row).partition("@")
        if number not in {"W1", "W2", "W3"} or "paced" in row.row or not length.isdigit():
            continue
        for contender, median in row.medians.items():
            points.setdefault((number, contender), []).append((int(length), median))
    return [Line(name, contender, sorted(found)) for (name, contender), found in points.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw; 1 when the file is no result or matplotlib is missing."""
    args = _parser().parse_args(argv)
    if not can_draw():
        return 1
    try:
        found = last(rows=TARGETS) if args.file is None else (args.file, read(args.file))
    except NotAResult as error:
        progress(f"bench: {error}")
        return 1
    if found is None:
        progress("bench: there is no committed result")
        return 1
    path, result = found
    stem = args.out or RESULTS / path.stem
    stem.parent.mkdir(parents=True, exist_ok=True)
    _draw_bars(result, bars(result, args.pair), args.pair, stem.with_name(f"{stem.name}-ratios"))
    if lines := length_lines(result):
        _draw_lines(result, lines, stem.with_name(f"{stem.name}-cpu-by-length"))
    return 0


def _draw_bars(result: Result, drawn: Sequence[Bar], pair: str, stem: Path) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(figsize=(9, 1.4 + _BAR_INCHES * len(drawn)), layout="constrained")
    for place, bar in enumerate(drawn):
        axes.barh(place, bar.value, color=bar.colour, height=0.7)
        axes.plot(bar.bracket, (place, place), color="black", linewidth=1)
        axes.annotate(f" {bar.value:.2f}", (bar.bracket[1], place), va="center", fontsize=7)
        if bar.target is not None:
            axes.plot((bar.target, bar.target), (place - 0.38, place + 0.38), "k", linewidth=2)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(drawn)), [bar.name for bar in drawn], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.12)
    ticks = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    axes.set_xticks(ticks, [f"{one:g}" for one in ticks])
    axes.minorticks_off()
    axes.set_xlabel(f"{pair}, medians; less is better; thick mark: target, thin: 10 to 90 %")
    axes.legend(
        handles=[Patch(color=colour, label=str(name)) for name, colour in _COLOURS.items()],
        fontsize=7,
        loc="best",
    )
    axes.set_title(f"{result.taken_at[:10]}, commit {result.commit[:8]}", fontsize=9)
    _save(figure, stem)


def _draw_lines(result: Result, drawn: Sequence[Line], stem: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    colours: dict[str, str] = {}
    marks = {"W1": ("o", "hashes"), "W2": ("s", "hashes, overlap"), "W3": ("^", "tokens")}
    for line in drawn:
        colour = colours.setdefault(line.contender, f"C{len(colours)}")
        mark, what = marks[line.name]
        axes.plot(
            [tokens for tokens, _ in line.points],
            [cost for _, cost in line.points],
            color=colour,
            marker=mark,
            linewidth=1.2,
            markersize=4,
            label=f"{line.contender}: {line.name} {what}",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths := sorted({tokens for one in drawn for tokens, _ in one.points}))
    axes.set_xticklabels([str(one) for one in lengths])
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("CPU µs per POST /select")
    axes.grid(visible=True, linewidth=0.3)
    axes.legend(fontsize=7)
    axes.set_title(f"{result.taken_at[:10]}, commit {result.commit[:8]}", fontsize=9)
    _save(figure, stem)


def _save(figure: Any, stem: Path) -> None:
    path = stem.with_name(f"{stem.name}.svg")
    figure.savefig(path, metadata={"Date": None})
    progress(f"written to {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.compare.plot", description=__doc__)
    parser.add_argument(
        "file", type=Path, nargs="?", help="a result (default: the newest committed whole one)"
    )
    parser.add_argument("--pair", default="ours / 1.6.1", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="file names begin so (default: as the result's)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
