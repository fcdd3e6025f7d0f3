"""Line charts as SVG inside one HTML file that loads nothing: for profiles and replays.

No library: a chart is axes, lines and a legend. Colours are those of the Okabe-Ito palette.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Chart", "Line", "page"]

WIDTH, HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 28, 40
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_TICKS: Final = 5
_STYLE: Final = (
    "body{font:14px system-ui,sans-serif;margin:24px;color:#222;background:#fff}"
    "svg{display:block;margin:0 0 4px}text{font:11px system-ui,sans-serif}"
    "table{border-collapse:collapse;margin:8px 0 24px}"
    "td,th{border:1px solid #ccc;padding:3px 9px;text-align:right}"
    "th:first-child,td:first-child{text-align:left}"
)


class Line(NamedTuple):
    """One curve: steps hold their value until the next point; dots are not joined."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "line"  # or "step", "dots"


class Chart(NamedTuple):
    """Several lines over one axis each way."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]


def page(title: str, parts: Iterable[Chart | Sequence[Sequence[str]]]) -> str:
    """Return an HTML document of charts and tables; the first row of a table is its head."""
    body = "".join(_svg(one) if isinstance(one, Chart) else _table(one) for one in parts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(one)}</td>" for one in row) + "</tr>" for row in rows[1:]
    )
    return f"<table><tr>{head}</tr>{body}</table>"


class _Scale(NamedTuple):
    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def _svg(chart: Chart) -> str:
    xs = [x for line in chart.lines for x, _ in line.points] or [0.0]
    ys = [y for line in chart.lines for _, y in line.points] or [0.0]
    across = _Scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, _LEFT, WIDTH - _RIGHT)
    low = min(0.0, *ys)
    up = _Scale(low, max(ys) if max(ys) > low else low + 1, HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg role="img" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f'<text x="{_LEFT}" y="16" style="font-weight:600">{escape(chart.title)}</text>',
        *_axes(chart, across, up),
    ]
    for index, line in enumerate(chart.lines):
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(_drawn(line, across, up, colour))
        x = _LEFT + 8 + 120 * index
        parts.append(f'<rect x="{x}" y="{HEIGHT - 12}" width="10" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="{HEIGHT - 7}">{escape(line.name)}</text>')
    return "".join(parts) + "</svg>"


def _axes(chart: Chart, across: _Scale, up: _Scale) -> list[str]:
    parts = []
    for tick in range(_TICKS + 1):
        value = up.low + (up.high - up.low) * tick / _TICKS
        y = up.at(value)
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
        )
        value = across.low + (across.high - across.low) * tick / _TICKS
        parts.append(
            f'<text x="{across.at(value):.1f}" y="{HEIGHT - _BOTTOM + 14}" text-anchor="middle">'
            f"{value:.4g}</text>"
        )
    parts.append(
        f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 7}" text-anchor="end">{escape(chart.x)}</text>'
        f'<text x="{WIDTH - _RIGHT}" y="16" text-anchor="end">{escape(chart.y)}</text>'
    )
    return parts


def _drawn(line: Line, across: _Scale, up: _Scale, colour: str) -> str:
    spots = [(across.at(x), up.at(y)) for x, y in line.points]
    if line.kind == "dots":
        return "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots
        )
    path: list[str] = []
    for index, (x, y) in enumerate(spots):
        if line.kind == "step" and index:
            path.append(f"H{x:.1f}V{y:.1f}")
        else:
            path.append(f"{'L' if index else 'M'}{x:.1f},{y:.1f}")
    return f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
