"""Both views of the same picture."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from select_service.demo.stats import DecisionLine
from select_service.demo.view import Board, BoardRow, FleetPicture, LiveTable, PlainView

ROW = BoardRow(
    worker_id=7,
    up=True,
    restarts=2,
    running=3,
    waiting=1,
    prefill_tokens=512,
    decode_blocks=40,
    blocks_held=100,
    blocks_capacity=256,
    hit_rate_predicted=0.41,
    hit_rate_actual=0.43,
)
BOARD = Board(
    title="a fleet",
    seconds=12.0,
    issued=30,
    finished=28,
    decisions_per_s=2.5,
    latency_p50_s=0.0021,
    rows=[ROW, replace(ROW, worker_id=8, up=False, prefill_tokens=None, decode_blocks=None)],
    decisions=[DecisionLine("chat-1", 7, 20, 15, 0.003)],
)


def test_plain_is_a_line_per_picture() -> None:
    lines: list[str] = []
    with PlainView(lines.append) as view:
        assert view is not None
        PlainView(lines.append).show(BOARD)
    legend, line = lines
    assert all(f"{word}:" in legend for word in ("wN", "load", "held", "hit"))
    assert "28/30 done  2.5 decisions/s on average  w7" in line
    assert "w7 load=512t/40b held=100/256 hit=43%(predicted 41%)" in line
    assert "w8 down load=-t/-b" in line


def drawn(board: Board, columns: int) -> str:
    file = io.StringIO()
    view = LiveTable(Console(file=file, width=columns, force_terminal=True, color_system=None))
    with view:
        view.show(board)
    return re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", file.getvalue()).replace("\r", "\n")


FOREIGN = [
    replace(ROW, worker_id=n, blocks_held=51_200, blocks_capacity=51_200, prefill_tokens=123_456)
    for n in (990_001, 990_002)
]


@pytest.mark.parametrize("columns", [40, 60, 72, 80, 100, 120, 200])
def test_no_terminal_cuts_a_worker_or_its_hits(columns: int) -> None:
    text = drawn(replace(BOARD, rows=FOREIGN), columns)
    assert all(word in text for word in ("990001", "990002", "41%", "43%", "predicted", "actual"))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= columns


def test_eighty_columns_show_every_column_of_the_demo() -> None:
    text = drawn(replace(BOARD, rows=[replace(ROW, worker_id=990_001, blocks_capacity=512)]), 80)
    for word in ("state", "running", "waiting", "prefill", "decode", "100/512", "restarts"):
        assert word in text


def test_a_snapshot_is_the_last_busy_picture(tmp_path: Path) -> None:
    path = tmp_path / "demo.svg"
    snapshot = FleetPicture()
    snapshot.save(path)
    assert not path.exists()
    idle = [replace(ROW, running=0)]
    for board in (BOARD, replace(BOARD, title="second"), replace(BOARD, title="over", rows=idle)):
        snapshot.show(board)
    snapshot.save(path)
    text = path.read_text("utf-8")
    assert text.startswith("<svg")
    assert "second" in text
    assert "over" not in text.partition("<g class=")[2]
    snapshot.save(path)
    assert path.read_text("utf-8") == text
