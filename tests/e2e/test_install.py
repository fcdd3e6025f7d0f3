"""Installing from source, with a C compiler and without one: both work, and say what they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "indexer", "select_service")
BUILT = shutil.ignore_patterns("*.so", "_*.c", "__pycache__")
_REPORT = (
    # an editable install of this tree would lend its own kernels to the package under test
    "import sys; sys.meta_path[:] = [one for one in sys.meta_path"
    " if not getattr(one, '__module__', '').startswith('__editable__')];"
    "import json, select_service.edge.app, select_service.edge.codec as codec;"
    "from indexer.compiled import *;"
    "print(json.dumps([codec.__file__, kernels_in_use(), complaints()]))"
)
KERNELS = (
    "indexer._frames",
    "indexer._ingest",
    "indexer._names",
    "indexer._speed",
    "select_service._speed",
    "select_service.core._speed",
)


def source_tree(folder: Path) -> Path:
    """Copy what is packaged, without what was built from it."""
    folder.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=BUILT)
        else:
            shutil.copy(ROOT / part, folder)
    return folder


def _install(folder: Path, environment: dict[str, str]) -> list[object]:
    """Install what is here into a folder; returns what the installed code says of its kernels."""
    source, target = source_tree(folder / "source"), folder / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SELECT_SERVICE_PURE")}
    subprocess.run(
        [*pip, "--no-deps", "--target", str(target), str(source)],
        env=clean | environment,
        check=True,
        timeout=300,
    )
    page = target / "select_service/edge/console/static/index.html"
    assert page.is_file(), "the console is part of what is installed"
    said = subprocess.run(
        [sys.executable, "-c", _REPORT],
        env=clean | {"PYTHONPATH": str(target)},
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    report = msgspec.json.decode(said.stdout, type=list[object])
    assert Path(str(report[0])).is_relative_to(target)
    return report[1:]


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_with_a_compiler(tmp_path: Path) -> None:
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("there is no C compiler")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("there are no headers of Python")
    assert _install(tmp_path, {}) == [dict.fromkeys(KERNELS, True), []]


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_without_a_compiler(tmp_path: Path) -> None:
    report = _install(tmp_path, {"CC": "/bin/false"})
    assert report == [dict.fromkeys(KERNELS, False), []]
