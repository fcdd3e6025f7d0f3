"""The targets over their seeds and a few changes of each; and under the guided fuzzer."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.fuzz.budget import SECONDS, SEED
from tests.fuzz.decoders import TARGETS
from tests.fuzz.guided import RUNS, mutated
from tests.fuzz.seeds import seeds

CHANGES: Final = 1
ROOT: Final = Path(__file__).parents[2]
SHOWN: Final = 5000


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_and_some_changes(target: str) -> None:
    rng = random.Random(SEED)
    for seed in seeds(target):
        TARGETS[target](seed)
        for _ in range(CHANGES):
            TARGETS[target](mutated(seed, rng))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("target", TARGETS)
def test_guided_by_coverage(target: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="not installed: pip install '.[fuzz]'")
    bounds = [f"-runs={RUNS[target]}"] if SECONDS is None else [f"-max_total_time={SECONDS:.0f}"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz.guided", target, str(tmp_path / "corpus")),
            *(f"-seed={SEED % (1 << 31)}", f"-artifact_prefix={tmp_path}/", *bounds),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [path.read_bytes().hex() for path in tmp_path.iterdir() if path.is_file()]
    assert done.returncode == 0, (done.stderr[-SHOWN:], done.stdout[-SHOWN:], found)
    (summary,) = [line for line in done.stderr.splitlines() if line.startswith("Done ")]
    print(target, summary)
