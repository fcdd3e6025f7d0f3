"""Built with a C compiler, the package has its kernels anywhere; without one it works.

The wheel is installed with what it depends on, as `pip install` does it, and serves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import msgspec
import pytest

from tests.live.server import Server

ROOT = Path(__file__).parents[2]
PARTS = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "indexer", "select_service")
BUILT = shutil.ignore_patterns("*.so", "_*.c", "__pycache__")
_REPORT = (
    # an editable install of this tree would lend its own kernels to the package under test
    "import sys; sys.meta_path[:] = [one for one in sys.meta_path"
    " if not getattr(one, '__module__', '').startswith('__editable__')];"
    "import json, select_service.edge.app, select_service.edge.codec.json_codec as codec;"
    "from indexer.compiled import *;"
    "print(json.dumps([codec.__file__, kernels_in_use(), complaints()]))"
)
KERNELS = (
    "indexer._frames",
    "indexer._ingest",
    "indexer._names",
    "indexer._speed",
    "indexer._wire",
    "select_service._speed",
    "select_service.core._expiring_map",
    "select_service.core._ledger",
    "select_service.core._pricer",
    "select_service.core._record_ring",
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


PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
CLEAN = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SELECT_SERVICE_PURE")}
NO_COMPILER = {"CC": "/bin/false"}
QUICK = {"CC": str(ROOT / "tests/live/quick_cc")}


def _report(python: str, folder: Path, path: Path) -> list[object]:
    """Return where the installed code is, and what it says of its kernels."""
    said = subprocess.run(
        [python, "-c", _REPORT],
        env=CLEAN | {"PYTHONPATH": str(path)},
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return msgspec.json.decode(said.stdout, type=list[object])


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_a_wheel_brings_the_kernels_to_where_no_compiler_is(tmp_path: Path) -> None:
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("there is no C compiler")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("there are no headers of Python")
    source, wheels, venv = source_tree(tmp_path / "source"), tmp_path / "wheels", tmp_path / "venv"
    build = [*PIP, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(build, env=CLEAN | QUICK, check=True)
    (wheel,) = wheels.iterdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = str(venv / "bin/python")
    subprocess.run(
        [*PIP, "--python", python, "install", str(wheel)], env=CLEAN | NO_COMPILER, check=True
    )
    where, *report = _report(python, tmp_path, venv)
    assert Path(str(where)).is_relative_to(venv)
    assert report == [dict.fromkeys(KERNELS, True), []]
    assert next(venv.rglob("console/static/index.html")).is_file(), "the console is part of it"
    command = [str(venv / "bin/select-service")]
    with Server(tmp_path / "log", command, env={"PYTHONPATH": ""}) as server:
        assert server.request("GET", "/console").status == 200
    assert f"kernels={len(KERNELS)}/{len(KERNELS)}" in server.log_tail()


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_without_a_compiler(tmp_path: Path) -> None:
    source, target = source_tree(tmp_path / "source"), tmp_path / "target"
    subprocess.run(
        [*PIP, "install", "--no-deps", "--target", str(target), str(source)],
        env=CLEAN | NO_COMPILER,
        check=True,
    )
    where, *report = _report(sys.executable, tmp_path, target)
    assert Path(str(where)).is_relative_to(target)
    used, complaints = report
    assert used == dict.fromkeys(KERNELS, False)
    assert isinstance(complaints, list)
    (complaint,) = complaints
    assert complaint.startswith(f"{len(KERNELS)} OF {len(KERNELS)} COMPILED KERNELS ARE MISSING")
    for page in ("static", "docs"):
        assert (target / f"select_service/edge/console/{page}/index.html").is_file()


def test_an_editable_install_is_a_path() -> None:
    """Type checkers follow that, and not the finder that setuptools makes without this line."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["tool"]["setuptools"]["package-dir"] == {"": "."}


def test_what_makes_wheels_for_others_looks_for_every_kernel() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    sources = [
        one for part in ("indexer", "select_service") for one in ROOT.glob(f"{part}/**/_*.pyx")
    ]
    built = [".".join(one.relative_to(ROOT).with_suffix("").parts) for one in sources]
    assert sorted(built) == sorted(KERNELS)
    asked = tools["cibuildwheel"]["test-command"]
    assert all(f"{name}," in asked or f'{name}"' in asked for name in KERNELS)
