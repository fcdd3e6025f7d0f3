"""Plots as SVG text to embed in a page: lines and bars, without network access."""

from __future__ import annotations

import math
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

COLOURS: Final = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#b07c00",
    "#4a9fd8",
    "#808080",
    "#9c6352",
    "#7b4fd0",
    "#7aa32e",
    "#e7298a",
    "#3c8c40",
    "#c06a9a",
    "#008b8b",
    "#cf3a3a",
    "#8d88c0",
)
"""Each stands out from the light page and from the dark one."""
_WIDTH, _HEIGHT = 460, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 28, 40
_NAMES = 124  # columns for the names of bars, which lie beside them
_DIGIT = 7  # columns of a digit in the widest of the usual fonts

_READ_MAX: Final = 60
"""Points of a line whose values are shown where they are pointed at."""

_DASHES: Final = ((), (7, 4), (2, 3), (7, 3, 2, 3))
"""Lines and gaps in turn: not all people see colours apart, and the others show through gaps."""

_MARKS: Final = (
    "M-3.5-3.5h7v7h-7z",
    "M0-4.5L4.5 3.5H-4.5z",
    "M0-5L5 0L0 5L-5 0z",
    "M-4.5-3.5H4.5L0 4.5z",
    "M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    "M-4-4.5H4L-4 4.5H4z",
    "M-5-2H5V2H-5z",
    "M-4.5-2.5L-2.5-4.5L0-2L2.5-4.5L4.5-2.5L2 0L4.5 2.5L2.5 4.5L0 2L-2.5 4.5L-4.5 2.5L-2 0z",
)
"""Square, triangle, diamond, triangle upside down, plus, hourglass, beam, cross: eight policies are
distinct where there are only dots, and lines with the same dashes differ in them."""
_MARKED: Final = 5  # signs on a line
_BESIDE_DOTS: Final = 0.05  # of the width, before the first dot and after the last

_HATCHES: Final = (
    "",
    "M-1 5L5-1M3 9L9 3",
    "M-1 3L5 9M3-1L9 5",
    "M0 4H8",
    "M4 0V8",
    "M0 4H8M4 0V8",
    "M2 2h2v2h-2zM6 6h2v2h-2z",
    "M-1 5L5-1M3 9L9 3M-1 3L5 9M3-1L9 5",
)
"""Strokes in a tile of 8 by 8, in the page's own colour; layers of a bar have one each."""


class Series(NamedTuple):
    """One line; steps hold their value until the next point, dots are not connected.

    `dots` are the names of dots that are not all called as the series is.
    """

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "line"  # or "step", "dots"
    dots: Sequence[str] = ()


class _Axis:
    """Maps values to positions in the drawing."""

    def __init__(
        self,
        *ends: float,
        log: bool = False,
        is_count: bool = False,
    ) -> None:
        low, high, begin, end = ends
        self.log = log
        self._step_min = 1.0 if is_count else 0.0
        if log:
            low, high = math.log10(max(low, 1e-6)), math.log10(max(high, 1e-6))
        if high <= low:
            high = low + 1.0
        self._low, self._high, self._begin, self._end = low, high, begin, end

    def at(self, value: float) -> float:
        """Return the position of a value."""
        if self.log:
            value = math.log10(max(value, 1e-6))
        share = (value - self._low) / (self._high - self._low)
        return self._begin + min(1.0, max(0.0, share)) * (self._end - self._begin)

    def ticks(self) -> list[float]:
        """Return the values to label on the axis."""
        if self.log:
            return self._log_ticks()
        step = max(_round_step((self._high - self._low) / 5), self._step_min)
        first = math.ceil(self._low / step - 1e-9)
        return [step * at for at in range(first, int(self._high / step + 1e-9) + 1)]

    def _log_ticks(self) -> list[float]:
        """Label powers of ten, intermediate values if those are few, or else the ends."""
        powers = range(math.floor(self._low), math.ceil(self._high) + 1)
        each = -(-len(powers) // 9)
        many = [digit * 10.0**power for power in powers[::each] for digit in (1, 2, 5)]
        marks = [mark for mark in many if self._low - 1e-9 <= math.log10(mark) <= self._high + 1e-9]
        few = [mark for mark in marks if mark in many[::3]]
        if len(few) >= 3:  # noqa: PLR2004 - two say where they are, three how it grows
            return few
        return marks if len(marks) > 1 else [10.0**self._low, 10.0**self._high]


def _number(value: float) -> str:
    """Format a number in the usual way if it is short enough."""
    return f"{value:,.3f}".rstrip("0").rstrip(".") if 0.01 <= value < 1e8 else f"{value:.3g}"  # noqa: PLR2004


def _mark_of(value: float) -> str:
    """Format what stands below bars: millions are short, or one would stand on the next."""
    return f"{value / 1e6:,g} M" if value >= 1e6 else _number(value)  # noqa: PLR2004


def _round_step(rough: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(power * one for one in (1, 2, 5, 10) if power * one >= rough * 0.999)


def lines(
    title: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    most: float = 0.0,
    is_count: bool = False,
) -> str:
    """Draw lines; the y axis goes from 0, or the least if it is logarithmic, to `most` or beyond.

    Args:
        title: above the plot.
        series: the lines.
        x: label of the x axis.
        y: label of the y axis.
        log_x: whether the x axis is logarithmic.
        log_y: likewise.
        most: the end of the y axis; 0: the maximum.
        is_count: the y axis has whole numbers only.
    """
    points = [point for one in series for point in one.points]
    xs = [at for at, _ in points if not log_x or at > 0.0] or [0.0, 1.0]
    top = most or max((value for _, value in points), default=1.0) or 1.0
    begin, end = min(xs), max(xs)
    if not log_x and any(one.kind == "dots" for one in series):  # none on the axis's own numbers
        room = _BESIDE_DOTS * (end - begin or 1.0)
        begin, end = begin - (min(room, begin) if begin >= 0.0 else room), end + room
    across = _Axis(begin, end, _LEFT, _WIDTH - _RIGHT, log=log_x)
    least = min((value for _, value in points if value > 0.0), default=0.1) if log_y else 0.0
    up = _Axis(least, top, _HEIGHT - _BOTTOM, _TOP, log=log_y, is_count=is_count)
    parts = [_frame(title, across, up, x, y)]
    for number, one in enumerate(series):
        places = [(across.at(at), up.at(value)) for at, value in one.points]
        parts.append(_drawn(one, places, number))
    return _sheet(title, parts)


def _drawn(one: Series, places: Sequence[tuple[float, float]], number: int) -> str:
    colour, name = COLOURS[number % len(COLOURS)], f"<title>{escape(one.name)}</title>"
    if one.kind == "dots":
        names = one.dots or [one.name] * len(places)
        return "".join(
            _mark(number, *place, _point_label(called, point))
            for called, place, point in zip(names, places, one.points, strict=True)
        )
    # what is pointed at is read out; a line of many points has them at equal steps
    step = -(-len(places) // _READ_MAX)
    pairs = list(zip(places, one.points, strict=True))[::step] if places else []
    read = "".join(_dot(one.name, *pair) for pair in pairs)
    stroke = f'fill="none" stroke="{colour}" stroke-width="1.6"'
    if dashes := _DASHES[number % len(_DASHES)]:
        stroke += f' stroke-dasharray="{" ".join(map(str, dashes))}"'
    if one.kind == "step":
        turns = [(x, y, then) for (_, y), (x, then) in pairwise(places) if y != then]
        corners = [corner for x, y, then in turns for corner in ((x, y), (x, then))]
        places = [*places[:1], *corners, *places[-1:]]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    # between the ends, which many lines have in common, and for each line elsewhere
    at = [len(places) * (2 * one + 1 + number % 2) // (2 * _MARKED + 1) for one in range(_MARKED)]
    marks = "".join(_mark(number, *places[one]) for one in dict.fromkeys(at) if places)
    shown = f'<polyline {stroke} points="{path}">{name}</polyline><g fill="{colour}">{read}</g>'
    return shown + marks


def _mark(number: int, x: float, y: float, label: str = "") -> str:
    """Draw the sign of a line at a place: beside its dashes it is one of sixteen."""
    sign = _MARKS[(number + number // len(_MARKS)) % len(_MARKS)]
    colour = COLOURS[number % len(COLOURS)]
    title, kind = (f"<title>{escape(label)}</title>", "d") if label else ("", "m")
    place = f"translate({x:.1f} {y:.1f})"
    return f'<path d="{sign}" transform="{place}" fill="{colour}" class="{kind}">{title}</path>'


def sample(number: int, *, filled: bool = False) -> str:
    """Return the picture that stands in a legend for a line, or for a layer of bars."""
    drawn = _filled(number, 0, 0, 34, 12) if filled else _stroke(number) + _mark(number, 17, 6)
    return f'<svg class="s" aria-hidden="true" width="34" height="12">{drawn}</svg>'


def _stroke(number: int) -> str:
    dashes = " ".join(map(str, _DASHES[number % len(_DASHES)])) or "none"
    colour = COLOURS[number % len(COLOURS)]
    return f'<path d="M0 6H34" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dashes}"/>'


def _filled(number: int, x: float, y: float, width: float, height: float, label: str = "") -> str:
    """Draw a rectangle in the colour and the hatching of a layer."""
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    hatch = number % len(_HATCHES)
    over = f'<rect {box} fill="url(#hatch-{hatch})" pointer-events="none"/>' if hatch else ""
    title = f"<title>{escape(label)}</title>" if label else ""
    return f'<rect {box} fill="{COLOURS[number % len(COLOURS)]}">{title}</rect>{over}'


FILLS: Final = (
    '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>'
    + "".join(
        f'<pattern id="hatch-{at}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<path d="{strokes}" stroke="var(--page,#fff)" stroke-width="1.6" fill="none"/></pattern>'
        for at, strokes in enumerate(_HATCHES)
        if strokes
    )
    + "</defs></svg>"
)
"""The hatchings, once in a page that has bars of layers."""


def _dot(name: str, place: tuple[float, float], point: tuple[float, float]) -> str:
    return (
        f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="3" class="h">'
        f"<title>{escape(_point_label(name, point))}</title></circle>"
    )


def _point_label(name: str, point: tuple[float, float]) -> str:
    return f"{name}: {_number(point[1])} at {_number(point[0])}"


def bars(title: str, names: Sequence[str], values: Sequence[float], *, x: str) -> str:
    """Draw one bar for each name, which stands beside it, in the colour of its line elsewhere."""
    amounts = [_amount(value) for value in values]
    room = _DIGIT * max(map(len, amounts), default=0)  # beside the longest bar, too
    across = _Axis(0.0, max(values, default=1.0) or 1.0, _NAMES, _WIDTH - _RIGHT - room)
    parts = [_frame(title, across, None, x, "", left=_NAMES)]
    for number, (name, value, amount) in enumerate(zip(names, values, amounts, strict=True)):
        top, height, label = _row(name, number, len(names))
        end = across.at(value)
        parts.append(label + _bar(number, top, end - _NAMES, height, f"{name}: {value:.4g}"))
        parts.append(f'<text x="{end + 4:.1f}" y="{top + height / 2 + 4:.1f}">{amount}</text>')
    return _sheet(title, parts)


def stacked(
    title: str, names: Sequence[str], layers: Sequence[tuple[str, Sequence[float]]], *, x: str
) -> str:
    """Draw one bar for each name, of layers with a hatching and a value for each name."""
    totals = [sum(values) for values in zip(*[values for _, values in layers], strict=True)]
    across = _Axis(0.0, max(totals, default=1.0) or 1.0, _NAMES, _WIDTH - _RIGHT)
    parts = [_frame(title, across, None, x, "", left=_NAMES)]
    for at, name in enumerate(names):
        top, height, label = _row(name, at, len(names))
        parts.append(label)
        before = 0.0
        for number, (layer, values) in enumerate(layers):
            begin, end = across.at(before), across.at(before + values[at])
            before += values[at]
            label = f"{name}, {layer}: {values[at]:.4g}"
            parts.append(_filled(number, begin, top, end - begin, height, label))
    return _sheet(title, parts)


def _row(name: str, number: int, count: int) -> tuple[float, float, str]:
    """Return the top and the height of one of so many bars, and its name beside it."""
    each = (_HEIGHT - _BOTTOM - _TOP) / max(1, count)
    top = _TOP + (number + 0.15) * each
    middle = top + 0.35 * each + 4
    label = f'<text x="{_NAMES - 5}" y="{middle:.1f}" class="y">{escape(name)}</text>'
    return top, 0.7 * each, label


def _bar(number: int, top: float, width: float, height: float, label: str) -> str:
    return (
        f'<rect x="{_NAMES}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{COLOURS[number % len(COLOURS)]}"><title>{escape(label)}</title></rect>'
    )


def _amount(value: float) -> str:
    """Format a value beside its bar: three digits, or all of a large one."""
    text = f"{value:.3g}"
    return f"{value:,.0f}" if "e+" in text else text


def _frame(title: str, across: _Axis, up: _Axis | None, x: str, y: str, left: float = _LEFT) -> str:
    right, floor = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [f'<text x="{_WIDTH / 2}" y="16" class="t">{escape(title)}</text>']
    for value in up.ticks() if up is not None else ():
        at = up.at(value) if up is not None else 0.0
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" class="g"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{at + 4:.1f}" class="y">{_number(value)}</text>')
    format_tick = _number if up is not None else _mark_of
    for value in across.ticks():
        at = across.at(value)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{floor}" class="g"/>')
        parts.append(f'<text x="{at:.1f}" y="{floor + 14}" class="v">{format_tick(value)}</text>')
    parts.append(f'<text x="{(left + right) / 2}" y="{_HEIGHT - 8}" class="v">{escape(x)}</text>')
    parts.append(f'<text x="4" y="16" class="n">{escape(y)}</text>')
    return "".join(parts)


def _sheet(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(title)}">'
        "<style>text{font:11px sans-serif;fill:var(--text,#333)}.t{font-weight:600;"
        "text-anchor:middle;font-size:13px}.v{text-anchor:middle}.y{text-anchor:end}"
        ".g{stroke:var(--line,#e4e4e4)}.h{opacity:0;stroke:transparent;stroke-width:8}"
        ".h:hover{opacity:1}.m{stroke:var(--page,#fff);pointer-events:none}</style>"
        f"{''.join(parts)}</svg>"
    )
