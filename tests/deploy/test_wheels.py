"""Wheels for other C libraries and processors ask for nothing that those do not have."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.deploy import wheels


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_a_wheel_fits_where_it_is_for(tmp_path: Path) -> None:
    """In one test: of several, every process that runs some would set up the tools again."""
    there = {k: v for k, v in wheels.TARGETS.items() if shutil.which(v.compiler)}
    if not there:
        pytest.skip("no compiler here")
    python = wheels.build_tools(sys.executable, tmp_path / "venv")
    for kind, target in there.items():
        wheel = wheels.build(python, target, tmp_path / kind)
        assert f"linux_{target.arch}.whl" in wheel.name
        for other in wheels.TARGETS.values():  # what is for another is noticed
            found = wheels.complaints(wheel, other, tmp_path / kind / "content")
            assert bool(found) == (other is not target), found
