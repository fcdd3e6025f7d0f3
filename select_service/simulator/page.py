"""A self-contained HTML file of text, tables and plots, for a browser and for print."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Final

import msgspec

from select_service.simulator.plots import FILLS, sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LIGHT: Final = "--page:#fff;--sunk:#f6f6f6;--line:#ddd;--text:#222;--muted:#555"
_DARK: Final = "--page:#14181e;--sunk:#1e242c;--line:#39424e;--text:#e4e9f0;--muted:#a3aebb"
_STYLE: Final = (
    f":root{{color-scheme:light dark;{_LIGHT}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    "body{font:14px system-ui,sans-serif;margin:1.5em;color:var(--text);background:var(--page);"
    "overflow-wrap:anywhere}h1{font-size:1.5em}p{max-width:75ch}"
    ".verdict{font-size:1.15em;font-weight:600}.made{color:var(--muted)}summary{cursor:pointer}"
    "summary h2{display:inline}"
    ".made span{display:inline-block;max-width:100%}"
    # where a table goes on, there is a shadow
    ".wide{overflow-x:auto;background:linear-gradient(90deg,var(--page) 30%,transparent) local,"
    "linear-gradient(270deg,var(--page) 30%,transparent) 100% 0 local,"
    "linear-gradient(90deg,var(--muted),transparent) 0 0 scroll,"
    "linear-gradient(270deg,var(--muted),transparent) 100% 0 scroll;background-repeat:no-repeat;"
    "background-size:3em 100%,3em 100%,.6em 100%,.6em 100%}"
    "table{border-collapse:collapse;margin:1em 0}"
    "th,td{padding:.25em .7em;text-align:right;border-bottom:1px solid var(--line);"
    "overflow-wrap:normal}"
    "th:first-child,td:first-child,.word{text-align:left}"
    "pre{background:var(--sunk);padding:1em;white-space:pre-wrap}"
    "figure{display:inline-block;vertical-align:top;margin:0 1em 1em 0;max-width:100%}"
    "svg{display:block;max-width:100%;height:auto}figcaption{max-width:460px}"
    ".key span{margin-right:1.2em;max-width:100%;display:inline-block}"
    ".key .s{display:inline-block;vertical-align:middle;margin-right:.35em;"
    "-webkit-print-color-adjust:exact;print-color-adjust:exact}"
    ".m{stroke:var(--page)}"
    # there plots are narrower than they were drawn
    "@media(max-width:500px){svg .v,svg .n,svg .g+.y{font-size:13px}}"
)

_NUMBER: Final = re.compile(r"$|[-\u2013+±]?\s*\d|[-\u2013]$")
"""How a cell begins that is read as a number, or stands for none."""


def page(title: str, parts: Iterable[str], *, verdict: str, command_line: str = "") -> str:
    """Return an HTML document.

    Args:
        title: also its headline.
        parts: markup.
        verdict: what came of it, in a sentence.
        command_line: what made it; the date is added.
    """
    named = escape(title)
    made = f"Made on {datetime.now(UTC):%Y-%m-%d at %H:%M} UTC"
    typed = " ".join(f"<span>{escape(one)}</span>" for one in command_line.split())
    made += f" by <code>{typed}</code>" if command_line else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{named}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main><h1>{named}</h1>"
        f'<p class="verdict">{escape(verdict)}</p><p class="made">{made}</p>'
        f"{FILLS if 'url(#' in (body := ''.join(parts)) else ''}{body}</main></body></html>\n"
    )


def folded(title: str, summary: str, content: object) -> str:
    """Return a section that a reader unfolds: a sentence, and long text, or settings as JSON."""
    text = content
    if not isinstance(text, str):
        text = msgspec.json.format(msgspec.json.encode(content), indent=2).decode()
    return (
        f"<details><summary><h2>{escape(title)}</h2></summary><p>{escape(summary)}</p>"
        f"<pre>{escape(text)}</pre></details>"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; on a narrow page it scrolls by itself, by the keyboard, too.

    Numbers stand on the right of their columns, and words on the left.
    """
    cells_by_row = [*rows]
    worded = [
        not all(_NUMBER.match(cell) for cell in column)
        for column in zip(*cells_by_row, strict=True)
    ]
    kinds = [' class="word"' if one else "" for one in worded or [False] * len(head)]
    named = zip(head, kinds, strict=True)
    lines = ["".join(f'<th scope="col"{kind}>{escape(cell)}</th>' for cell, kind in named)]
    for row in cells_by_row:
        cells = zip(row, kinds, strict=True)
        lines.append("".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in cells))
    body = "".join(f"<tr>{one}</tr>" for one in lines)
    return f'<div class="wide" tabindex="0"><table>{body}</table></div>'


def key(names: Iterable[str], *, filled: bool = False) -> str:
    """Return a legend: the colour, dashes and sign of each line, or the hatching of each layer."""
    spans = (
        f"<span>{sample(at, filled=filled)}{escape(name)}</span>" for at, name in enumerate(names)
    )
    return f'<p class="key">{"".join(spans)}</p>'


def figure(plot: str, names: Sequence[str] = (), *, filled: bool = False) -> str:
    """Return a plot, with a legend of its own if names are given, of lines or of layers."""
    legend = f"<figcaption>{key(names, filled=filled)}</figcaption>" if names else ""
    return f"<figure>{plot}{legend}</figure>"
