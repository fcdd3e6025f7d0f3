"""Wheels as a release has them, as far as one machine goes: `make wheels-check`.

cibuildwheel builds in images of PyPA, which this needs none of: Debian's compilers for glibc and
musl build the same package, and what each kernel asks of the system is read from its file. Kernels
for arm64 also run, below qemu, in Debian's arm64 Python. Not covered: musllinux for arm64, for
which Debian has no compiler, and running what is built for musl, for which it has no Python.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PARTS = ("indexer", "select_service", "setup.py", "pyproject.toml", "README.md", "LICENSE")
BUILT = shutil.ignore_patterns("*.so", "_*.c", "__pycache__")
GLIBC = (2, 28)
"""What cibuildwheel's images have, and so what its wheels may ask for."""
MOVED = {"dlopen", "dlsym"}
"""They went from libdl to libc in 2.34: their version says where a wheel was built."""
MIRROR = "http://deb.debian.org/debian"
TESTS = (
    "tests/indexer/test_compiled.py", "tests/indexer/core/test_ingest.py",
    "tests/indexer/core/test_hashing.py", "tests/select_service/core/ledger/test_load_rows.py",
    "tests/select_service/core/pricing/test_pricer.py",
    "tests/select_service/core/test_expiring_map.py",
)  # fmt: skip
NOT_OF_WHEELS = (
    "tests/indexer/test_compiled.py::test_everybody_asks_for_the_kernel_that_is_built",
    "tests/indexer/test_compiled.py::test_the_variable_reaches_a_whole_process",
)
"""They need the sources of kernels, and an interpreter that runs without qemu."""
NEEDED_BY_TESTS = (
    "hypothesis", "msgspec", "numpy", "orjson", "pytest", "pytest-timeout", "pyzmq",
    "sortedcontainers", "typing-extensions", "xxhash",
)  # fmt: skip
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


class Target(NamedTuple):
    """What wheels are built for, and the compiler for it."""

    libc: str
    arch: str
    machine: str
    compiler: str
    libraries: set[str]


TARGETS = {
    "manylinux_x86_64": Target("gnu", "x86_64", "X86-64", "gcc", {"libc.so.6"}),
    "manylinux_aarch64": Target(
        "gnu", "aarch64", "AArch64", "aarch64-linux-gnu-gcc", {"libc.so.6", "ld-linux-aarch64.so.1"}
    ),
    "musllinux_x86_64": Target("musl", "x86_64", "X86-64", "musl-gcc", {"libc.so"}),
}


def build_tools(python: str, folder: Path) -> str:
    """An interpreter of that kind that can build."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    ours = str(folder / "bin" / "python")
    tools = ("setuptools>=77", "cython>=3.0")
    subprocess.run([ours, *PIP, "install", "--upgrade", *tools], check=True)
    return ours


def build(python: str, target: Target, folder: Path) -> Path:
    """The wheel of this tree for a target, not optimized."""
    source, compiler = folder / "source", folder / "cc"
    source.mkdir(parents=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=BUILT)
        else:
            shutil.copy(ROOT / part, source)
    compiler.write_text(f'#!/bin/sh\nexec {target.compiler} "$@" -O0\n')
    compiler.chmod(0o755)
    asked = "import sys; print(sys.implementation.cache_tag)"
    tag = subprocess.check_output([python, "-c", asked], text=True).strip()
    environment = {
        "CC": str(compiler),
        "LDSHARED": f"{compiler} -shared",
        "SETUPTOOLS_EXT_SUFFIX": f".{tag}-{target.arch}-linux-{target.libc}.so",
        "_PYTHON_HOST_PLATFORM": f"linux-{target.arch}",
    }
    command = [python, "-W", "ignore", "setup.py", "--quiet", "bdist_wheel"]
    done = subprocess.run(
        command, cwd=source, env=os.environ | environment, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


def complaints(wheel: Path, target: Target, folder: Path) -> list[str]:
    """What a machine that the wheel is for would lack; leaves the content in the folder."""
    with zipfile.ZipFile(wheel) as content:
        content.extractall(folder)
    wanted = {
        one.stem for part in ("indexer", "select_service") for one in (ROOT / part).rglob("_*.pyx")
    }
    files = sorted(folder.rglob("*.so"))
    found = [f"no {one}" for one in wanted - {file.name.partition(".")[0] for file in files}]
    for file in files:
        command = ("readelf", "--wide", "--file-header", "--dynamic", "--dyn-syms", str(file))
        said = subprocess.check_output(command, text=True, env=os.environ | {"LC_ALL": "C"})
        if not re.search(rf"Machine:.*{target.machine}", said):
            found.append(f"{file.name}: not for {target.arch}")
        others = set(re.findall(r"\(NEEDED\).*\[(.+)\]", said)) - target.libraries
        found += [f"{file.name}: needs {one}" for one in sorted(others)]
        for symbol, version in re.findall(r" UND (\w+)@GLIBC_([\d.]+)", said):
            is_old = tuple(map(int, version.split(".")))[:2] <= GLIBC or symbol in MOVED
            if target.libc != "gnu" or not is_old:
                found.append(f"{file.name}: {symbol} of glibc {version}")
    return found


def arm64_root(folder: Path) -> Path:
    """Debian's Python for arm64, unpacked; nothing of it has to run for that."""
    root = folder / "arm64"
    flags = ("--foreign", "--arch=arm64", "--variant=minbase", "--include=python3")
    subprocess.run(["debootstrap", *flags, "bookworm", str(root), MIRROR], check=True)
    for package in (root / "var/cache/apt/archives").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
    return root


def run_below_qemu(content: Path, folder: Path) -> int:
    """Tests that compare kernels with their twins, on an arm64 that is played."""
    others = folder / "others"
    platforms = [f"--platform=manylinux_2_{one}_aarch64" for one in (17, 28)]
    flags = ("--only-binary=:all:", "--python-version=3.11", *platforms, "--target", str(others))
    subprocess.run([sys.executable, *PIP, "install", *flags, *NEEDED_BY_TESTS], check=True)
    for part in ("tests", "bench"):
        shutil.copytree(ROOT / part, content / part, ignore=BUILT)
    shutil.copy(ROOT / "pyproject.toml", content)
    root = arm64_root(folder)
    command = ["qemu-aarch64-static", "-L", str(root), str(root / "usr/bin/python3.11")]
    environment = {"PYTHONPATH": f"{content}:{others}", "TEST_EFFORT": "brief"}
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=1800", *TESTS]
    tests += [f"--deselect={one}" for one in NOT_OF_WHEELS]
    return subprocess.run(
        [*command, *tests], cwd=content, env=os.environ | environment, check=False
    ).returncode


def main(pythons: Sequence[str]) -> int:
    """Build and check all that can be; the number of what is wrong."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="select-service-wheels-") as name:
        for number, python in enumerate(pythons):
            ours = build_tools(python, Path(name) / f"venv-{number}")
            for kind, target in TARGETS.items():
                folder = Path(name) / f"{kind}-{number}"
                if shutil.which(target.compiler) is None:
                    sys.stderr.write(f"{kind}: no {target.compiler} here\n")
                    continue
                wheel = build(ours, target, folder)
                found = complaints(wheel, target, folder / "content")
                sys.stdout.write(f"{kind}: {wheel.name}: {'; '.join(found) or 'fits'}\n")
                wrong += len(found)
                if kind == "manylinux_aarch64" and "-cp311-" in wheel.name:
                    wrong += run_below_qemu(folder / "content", folder) != 0
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [sys.executable]) != 0)
