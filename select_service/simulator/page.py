"""A self-contained HTML file of text, tables and plots, for a browser and for print."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from select_service.simulator.plots import COLOURS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["figure", "key", "page", "table"]

_STYLE: Final = (
    "body{font:14px system-ui,sans-serif;margin:1.5em;color:#222;background:#fff}"
    "h1{font-size:1.5em}h1,pre{overflow-wrap:anywhere}p{max-width:75ch}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;margin:1em 0}"
    "th,td{padding:.25em .7em;text-align:right;border-bottom:1px solid #ddd}"
    "th:first-child,td:first-child{text-align:left}"
    "pre{background:#f6f6f6;padding:1em;white-space:pre-wrap}"
    "figure{display:inline-block;vertical-align:top;margin:0 1em 1em 0;max-width:100%}"
    "svg{display:block;max-width:100%;height:auto}figcaption{max-width:460px}"
    ".key span{margin-right:1.2em;white-space:nowrap;display:inline-block}"
    ".key i{display:inline-block;width:1em;height:.7em;margin-right:.35em;"
    "-webkit-print-color-adjust:exact;print-color-adjust:exact}"
)


def page(title: str, parts: Iterable[str]) -> str:
    """Return an HTML document; the title is also its headline, parts are markup."""
    named = escape(title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{named}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{named}</h1>{''.join(parts)}</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; on a narrow page it scrolls by itself."""
    names = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    lines = [names, *cells]
    return f'<div class="wide"><table>{"".join(f"<tr>{one}</tr>" for one in lines)}</table></div>'


def key(names: Iterable[str]) -> str:
    """Return a legend for the colours of lines and bars, in order."""
    spans = (
        f'<span><i style="background:{COLOURS[at % len(COLOURS)]}"></i>{escape(name)}</span>'
        for at, name in enumerate(names)
    )
    return f'<p class="key">{"".join(spans)}</p>'


def figure(plot: str, names: Sequence[str] = ()) -> str:
    """Return a plot, with a legend of its own if names are given."""
    return f"<figure>{plot}{f'<figcaption>{key(names)}</figcaption>' if names else ''}</figure>"
