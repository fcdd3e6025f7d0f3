"""Reading back what earlier runs wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from bench.compare.report import FORMAT
from bench.output import RESULTS
from bench.provenance import git

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["NotAResult", "Result", "ResultRatio", "ResultRow", "known", "last", "read"]


class NotAResult(ValueError):
    """A file that is not what `python -m bench.compare` writes today."""


class ResultRatio(msgspec.Struct):
    """Ours / peer of one row."""

    of_medians: float
    low: float
    high: float
    rounds: list[float]
    verdict: str | None = None


class ResultRow(msgspec.Struct):
    """One row."""

    row: str
    unit: str
    target: float | None
    medians: dict[str, float]
    ratios: dict[str, ResultRatio]


class Result(msgspec.Struct):
    """The part of a file that comparisons and plots use."""

    format: int
    taken_at: str
    commit: str
    rows: list[ResultRow]
    uncommitted_changes: bool = False


class _Head(msgspec.Struct):
    """What distinguishes a file of ours from others in the same folder."""

    taken_at: str = ""
    format: int = 0


def read(path: Path) -> Result:
    """Read one file.

    Raises:
        NotAResult: another kind of file, or of an older format.
    """
    try:
        data = path.read_bytes()
        if msgspec.json.decode(data, type=_Head).format != FORMAT:
            raise NotAResult(f"{path} is no comparison of format {FORMAT}")
        return msgspec.json.decode(data, type=Result)
    except (OSError, msgspec.DecodeError) as error:
        raise NotAResult(f"{path}: {error}") from error


def last(
    paths: Iterable[Path] | None = None, rows: Collection[str] = ()
) -> tuple[Path, Result] | None:
    """The newest of the committed comparisons that have these rows; None when there is none yet."""
    for path, result in _newest_first(paths):
        if {row.row for row in result.rows}.issuperset(rows):
            return path, result
    return None


def known(paths: Iterable[Path] | None = None) -> tuple[list[Path], list[ResultRow]]:
    """Each ratio from the newest committed comparison that has it, and the files they are from.

    Not the newest file alone: one of three rows would hide what has become worse in the others.
    """
    used: list[Path] = []
    rows: dict[str, ResultRow] = {}
    for path, result in _newest_first(paths):
        for row in result.rows:
            ratios = rows.setdefault(row.row, replace(row, ratios={})).ratios
            missing = row.ratios.keys() - ratios.keys()
            ratios |= {pair: row.ratios[pair] for pair in missing}
            if missing and path not in used:
                used.append(path)
    return used, list(rows.values())


def _newest_first(paths: Iterable[Path] | None) -> list[tuple[Path, Result]]:
    found: list[tuple[Path, Result]] = []
    for path in _committed() if paths is None else paths:
        try:
            found.append((path, read(path)))
        except NotAResult:
            continue
    return sorted(found, key=lambda one: one[1].taken_at, reverse=True)


def _committed() -> list[Path]:
    root = RESULTS.parents[1]
    listed = git("ls-files", "--", str(RESULTS.relative_to(root)))
    return [root / line for line in listed.splitlines() if line.endswith(".json")]
