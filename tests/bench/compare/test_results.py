"""Reading results back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from bench.compare.report import document, rows
from bench.compare.results import NotAResult, ResultRow, known, last, read
from bench.compare.run import Sample
from bench.compare.targets import TARGETS
from bench.output import RESULTS, result_path, write_json
from bench.provenance import git

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = [
    Sample("W1", "W1 select, hashes, isl 512", "CPU µs / select", name, number, value)
    for name, values in {"ours": [8.0, 9.0, 10.0], "1.6.1": [10.0, 10.0, 10.0]}.items()
    for number, value in enumerate(values, 1)
]


def written(path: Path, taken_at: str, samples: list[Sample] = SAMPLES) -> Path:
    write_json(path, document({"taken_at": taken_at, "commit": "0123456789"}, {}, samples))
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    result = read(written(tmp_path / "a.json", "2026-01-01T00:00:00+00:00"))
    assert result.commit == "0123456789"
    (row,) = result.rows
    assert row.medians == {"ours": 9.0, "1.6.1": 10.0}
    assert row.target == 0.5
    ratio = row.ratios["ours / 1.6.1"]
    assert (ratio.of_medians, ratio.rounds, ratio.verdict) == (0.9, [0.8, 0.9, 1.0], "missed")
    assert msgspec.convert(rows(SAMPLES), list[ResultRow], from_attributes=True) == result.rows


def test_the_newest_comparison_is_the_last(tmp_path: Path) -> None:
    older = written(tmp_path / "z.json", "2026-01-01T00:00:00+00:00")
    newer = written(tmp_path / "a.json", "2026-01-02T00:00:00+00:00")
    other = tmp_path / "admission.json"
    other.write_bytes(b'{"taken_at": "2027-01-01T00:00:00+00:00", "rows": [{"load": 1}]}')
    found = last([older, other, newer])
    assert found is not None
    assert found[0] == newer
    assert last([other]) is None
    more = [*SAMPLES, *(replace(one, row="W9") for one in SAMPLES)]
    whole = written(tmp_path / "b.json", "2026-01-01T00:00:00+00:00", more)
    found = last([whole, newer], rows=["W9"])
    assert found is not None
    assert found[0] == whole, "a picture of three rows is none of all"
    assert last([newer], rows=["W9"]) is None


def test_each_ratio_is_known_from_the_newest_comparison_that_has_it(tmp_path: Path) -> None:
    """A run of a few rows must not hide what an earlier one knows of all others."""
    w2 = "W2 select, 60-95% overlap, isl 2048"
    pure = [
        Sample("W1", SAMPLES[0].row, SAMPLES[0].unit, name, 1, value)
        for name, value in {"ours-pure": 15.0, "ours": 5.0, "1.6.1": 10.0}.items()
    ]
    whole = SAMPLES + [Sample("W2", w2, one.unit, one.contender, 1, one.value) for one in pure]
    older = written(tmp_path / "a.json", "2026-01-01T00:00:00+00:00", whole)
    newer = written(tmp_path / "b.json", "2026-01-02T00:00:00+00:00", pure)
    unused = written(tmp_path / "c.json", "2025-01-01T00:00:00+00:00")
    paths, found = known([unused, older, newer])
    assert paths == [newer, older]
    assert {row.row: {pair: r.of_medians for pair, r in row.ratios.items()} for row in found} == {
        SAMPLES[0].row: {"ours / 1.6.1": 0.5, "ours-pure / 1.6.1": 1.5},
        w2: {"ours / 1.6.1": 0.5, "ours-pure / 1.6.1": 1.5},
    }
    assert known([]) == ([], [])


@pytest.mark.skipif(not git("rev-parse", "HEAD"), reason="no repository here")
def test_every_row_with_a_target_has_a_committed_ratio() -> None:
    """Else `make bench` would not notice that it has become worse."""
    _, found = known()
    assert {row.row for row in found if "ours / 1.6.1" in row.ratios} >= set(TARGETS)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"format": 1}', b'{"format": 2}'])
def test_other_files_are_no_results(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(NotAResult, match=r"x\.json"):
        read(path)
    with pytest.raises(NotAResult):
        read(tmp_path / "missing.json")


def test_results_are_named_by_time_and_commit() -> None:
    document = {"taken_at": "2026-11-21T15:46:52+00:00", "commit": "2f7082d84668"}
    assert result_path(document) == RESULTS / "2026-11-21T154652Z-2f7082d8.json"
    assert result_path(document, "scaling").name == "2026-11-21T154652Z-scaling-2f7082d8.json"
