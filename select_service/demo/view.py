"""The display of a running demo: a live table on a terminal, plain lines elsewhere.

Both take the same `Board`, a picture of one moment that `session.py` creates.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from select_service.demo.stats import DecisionLine

_SNAPSHOT_COLUMNS: Final = 112
_UNBOUNDED_COLUMNS: Final = 10_000  # to measure a table by itself


@dataclass(frozen=True, slots=True)
class BoardRow:
    """One worker at one moment."""

    worker_id: int
    up: bool
    restarts: int
    running: int
    waiting: int
    prefill_tokens: int | None  # from GET /loads; None before the first answer
    decode_blocks: int | None
    blocks_held: int
    blocks_capacity: int
    hit_rate_predicted: float
    hit_rate_actual: float


@dataclass(frozen=True, slots=True)
class Board:
    """The whole fleet at one moment."""

    title: str
    seconds: float
    issued: int
    finished: int
    decisions_per_s: float  # on average, since the start
    latency_p50_s: float
    rows: Sequence[BoardRow]
    decisions: Sequence[DecisionLine]


class LiveTable:
    """A table that is redrawn in place."""

    interval_s = 0.25

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> object:
        return self._live.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def show(self, board: Board) -> None:
        """Redraw."""
        self._live.update(_picture(board, self._console), refresh=True)


_LEGEND: Final = (
    "wN: worker N; load: tokens to prefill (t) and KV blocks in use by requests (b); "
    "held: blocks in its cache, of how many; hit: share of prompt tokens found there (and what the "
    "service predicted)"
)


class PlainView:
    """A line per picture, for logs and pipes."""

    interval_s = 1.0

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def __enter__(self) -> object:
        self._write(_LEGEND)
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def show(self, board: Board) -> None:
        """Write one line."""
        workers = "  ".join(
            f"w{row.worker_id}{'' if row.up else ' down'}"
            f" load={_number(row.prefill_tokens)}t/{_number(row.decode_blocks)}b"
            f" held={row.blocks_held}/{row.blocks_capacity}"
            f" hit={row.hit_rate_actual:.0%}(predicted {row.hit_rate_predicted:.0%})"
            for row in board.rows
        )
        self._write(
            f"{board.seconds:6.1f}s  {board.finished}/{board.issued} done"
            f"  {board.decisions_per_s:.1f} decisions/s on average  {workers}"
        )


class FleetPicture:
    """Keeps the last picture of a busy fleet, and renders it as SVG for the README."""

    def __init__(self) -> None:
        self._board: Board | None = None

    def show(self, board: Board) -> None:
        """Remember a picture, unless it is idle and there already is one."""
        if self._board is None or any(row.running for row in board.rows):
            self._board = board

    def save(self, path: Path) -> None:
        """Write the picture; nothing if there is none."""
        if self._board is None:
            return
        console = Console(record=True, width=_SNAPSHOT_COLUMNS, file=io.StringIO())
        console.print(_picture(self._board, console))
        # a fixed id: two drawings of one picture are the same file
        text = console.export_svg(title="select-service demo", unique_id="demo")
        path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", "utf-8")


class _Column(NamedTuple):
    """A column of the live table: its header, in lines, and the cell of a row."""

    header: str
    cell: Callable[[BoardRow], str | Text]


_COLUMNS: Final = {
    "worker": _Column("worker", lambda row: str(row.worker_id)),
    "state": _Column(
        "state", lambda row: Text("up", "green") if row.up else Text("down", "bold red")
    ),
    "running": _Column("running", lambda row: str(row.running)),
    "waiting": _Column("waiting", lambda row: str(row.waiting)),
    "prefill": _Column("prefill\ntokens", lambda row: _number(row.prefill_tokens)),
    "decode": _Column("decode\nblocks", lambda row: _number(row.decode_blocks)),
    "cache": _Column("cache\nblocks", lambda row: f"{row.blocks_held}/{row.blocks_capacity}"),
    "predicted": _Column("hits\npredicted", lambda row: f"{row.hit_rate_predicted:.0%}"),
    "actual": _Column("hits\nactual", lambda row: f"{row.hit_rate_actual:.0%}"),
    "restarts": _Column("restarts", lambda row: str(row.restarts)),
}
_DROPPED_FIRST: Final = ("restarts", "decode", "prefill", "waiting", "running", "cache", "state")
"""Columns that a narrow terminal does without, in this order. What is left is never dropped."""


def _picture(board: Board, console: Console) -> Group:
    return Group(_fleet(board, console), _decisions(board))


def _fleet(board: Board, console: Console) -> Table:
    """The widest table that the terminal has room for: no cell and no header is ever cut.

    Spaces beside the rules go first, then columns.
    """
    unbounded = console.options.update(max_width=_UNBOUNDED_COLUMNS)
    table = _fleet_table(board, (), padding=1)
    for dropped in range(len(_DROPPED_FIRST) + 1):
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
        table = _fleet_table(board, _DROPPED_FIRST[:dropped], padding=0)
    return table


def _fleet_table(board: Board, without: Sequence[str], padding: int) -> Table:
    columns = {name: column for name, column in _COLUMNS.items() if name not in without}
    table = Table(
        title=board.title,
        caption=f"{board.seconds:.0f} s · {board.finished} of {board.issued} requests done"
        f" · {board.decisions_per_s:.1f} decisions/s on average"
        f" · p50 {board.latency_p50_s * 1e3:.1f} ms",
        padding=(0, padding),
    )
    for name, column in columns.items():
        justify: Literal["left", "right"] = "left" if name in ("worker", "state") else "right"
        table.add_column(column.header, justify=justify, no_wrap=True)
    for row in board.rows:
        table.add_row(*(column.cell(row) for column in columns.values()))
    return table


def _decisions(board: Board) -> Table:
    table = Table(title="last decisions", title_justify="left", box=None)
    for name in ("request", "worker", "prompt", "reused", "ms"):
        justify: Literal["left", "right"] = "left" if name == "request" else "right"
        table.add_column(name, justify=justify, no_wrap=name == "worker")
    for decision in board.decisions:
        table.add_row(
            decision.request_id,
            str(decision.worker_id),
            f"{decision.prompt_blocks} blocks",
            f"{decision.predicted_blocks} blocks",
            f"{decision.latency_s * 1e3:.1f}",
        )
    return table


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
