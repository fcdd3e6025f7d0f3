"""Reading back what earlier runs wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.compare.report import FORMAT
from bench.output import RESULTS
from bench.provenance import git

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["NotAResult", "Result", "ResultRatio", "ResultRow", "last", "read"]


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
    """What tells a file of ours from others in the same folder."""

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


def last(paths: Iterable[Path] | None = None) -> tuple[Path, Result] | None:
    """The newest comparison among the committed results; None when there is none yet."""
    candidates = _committed() if paths is None else paths
    found: list[tuple[str, Path, Result]] = []
    for path in candidates:
        try:
            result = read(path)
        except NotAResult:
            continue
        found.append((result.taken_at, path, result))
    if not found:
        return None
    _, path, result = max(found, key=lambda one: one[0])
    return path, result


def _committed() -> list[Path]:
    root = RESULTS.parents[1]
    listed = git("ls-files", "--", str(RESULTS.relative_to(root)))
    return [root / line for line in listed.splitlines() if line.endswith(".json")]
