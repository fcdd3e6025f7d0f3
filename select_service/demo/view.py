"""The display of a running demo: a live table on a terminal, plain lines elsewhere.

Both take the same `Board`, a picture of one moment that `session.py` creates.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from select_service.demo.stats import DecisionLine

_SNAPSHOT_COLUMNS: Final = 112


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
    decisions_per_s: float
    latency_p50_s: float
    rows: Sequence[BoardRow]
    decisions: Sequence[DecisionLine]


class View(Protocol):
    """Somewhere to show boards."""

    def __enter__(self) -> object: ...
    def __exit__(self, *exc_info: object) -> None: ...
    def show(self, board: Board) -> None:
        """Show a new picture."""


class LiveTable:
    """A table that is redrawn in place."""

    interval_s = 0.25

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> object:
        return self._live.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def show(self, board: Board) -> None:
        """Redraw."""
        self._live.update(_picture(board), refresh=True)


_LEGEND: Final = (
    "wN: worker N; load: tokens to prefill (t) and KV blocks in use by requests (b); "
    "held: blocks in its cache, of how many; hit: prompt tokens found there, and as the service "
    "predicted"
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
            f" hit={row.hit_rate_actual:.0%}(said {row.hit_rate_predicted:.0%})"
            for row in board.rows
        )
        self._write(
            f"{board.seconds:6.1f}s  {board.finished}/{board.issued} done"
            f"  {board.decisions_per_s:.1f} decisions/s  {workers}"
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
        console.print(_picture(self._board))
        # a fixed id: two drawings of one picture are the same file
        text = console.export_svg(title="select-service demo", unique_id="demo")
        path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", "utf-8")


def _picture(board: Board) -> Group:
    return Group(_fleet(board), _decisions(board))


def _fleet(board: Board) -> Table:
    table = Table(
        title=board.title,
        caption=f"{board.seconds:.0f} s · {board.finished} of {board.issued} requests done ·"
        f" {board.decisions_per_s:.1f} decisions/s · p50 {board.latency_p50_s * 1e3:.1f} ms",
    )
    table.add_column("worker")
    table.add_column("state")
    for name in (
        "running",
        "waiting",
        "prefill tokens",
        "decode blocks",
        "cache blocks",
        "hits predicted",
        "hits actual",
        "restarts",
    ):
        table.add_column(name, justify="right")
    for row in board.rows:
        table.add_row(
            str(row.worker_id),
            Text("up", style="green") if row.up else Text("down", style="bold red"),
            str(row.running),
            str(row.waiting),
            _number(row.prefill_tokens),
            _number(row.decode_blocks),
            f"{row.blocks_held}/{row.blocks_capacity}",
            f"{row.hit_rate_predicted:.0%}",
            f"{row.hit_rate_actual:.0%}",
            str(row.restarts),
        )
    return table


def _decisions(board: Board) -> Table:
    table = Table(title="last decisions", title_justify="left", box=None)
    for name in ("request", "worker", "prompt", "reused", "ms"):
        table.add_column(name, justify="left" if name == "request" else "right")
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
