"""Fetches engine wheels and unpacks their Python files, for the genuine publishers in tests.

Nothing of an engine is installed and nothing binary of it is used; of a wheel of some 400 MB a few
megabytes stay in `.engines/`. Run as a script it fetches all; what cannot be fetched is noted
beside it and the tests that need it skip with that reason.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2] / ".engines"
PYTHON = ROOT / "venv" / "bin" / "python"

# What the engines' publisher modules import besides the engine itself.
PUBLISHER_NEEDS = (
    *("pyzmq", "msgspec", "msgpack", "httpx", "xxhash", "cbor2"),
    *("pydantic", "psutil", "urllib3", "packaging", "pyyaml"),
)
# Some wheels exist for one interpreter only.
ANY_INTERPRETER = (
    *("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"),
    *("--platform", "manylinux_2_34_x86_64"),
)
# Large parts of the engines that no publisher imports.
LEFT_OUT = (
    "vllm/model_executor/",
    "vllm/third_party/",
    "sglang/srt/models/",
    "sglang/srt/layers/",
)
TIMEOUT_S = 600


@dataclass(frozen=True)
class Engine:
    """One engine release, and what is particular about its events."""

    package: str
    version: str
    dialect: str

    @property
    def name(self) -> str:
        return f"{self.package}-{self.version}"

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    @property
    def reason_file(self) -> Path:
        return ROOT / f"{self.name}.reason"


ENGINES = (
    Engine("vllm", "0.9.0", "arrays, batches of two, no media, no adapters' names"),
    Engine("vllm", "0.10.2", "arrays, media, bytes hashes"),
    Engine("vllm", "0.24.0", "maps, groups, replay with 3 frames"),
    Engine("vllm", "0.33.0", "maps, locality, sessions, replay with 4 frames"),
    Engine("sglang", "0.4.6.post5", "arrays, signed hashes"),
    Engine("sglang", "0.5.23", "maps, signed hashes, replay with 4 frames"),
)


def why_missing(engine: Engine) -> str | None:
    """None if the engine is there, else the reason."""
    if not (ROOT / "venv" / ".done").exists():
        return "the publishers' virtualenv is missing; make test-full makes it"
    if (engine.folder / ".done").exists():
        return None
    if engine.reason_file.exists():
        return f"{engine.name}: {engine.reason_file.read_text('utf-8')}"
    return f"{engine.name} was not fetched; make test-full does"


def fetch(engine: Engine) -> None:
    """Download and unpack one engine, unless it is there already."""
    if (engine.folder / ".done").exists():
        print(f"have {engine.name}")
        return
    ROOT.mkdir(exist_ok=True)
    print(f"fetching {engine.name} ({engine.dialect})", flush=True)
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        problem = _download(engine, Path(folder)) and _download(
            engine, Path(folder), ANY_INTERPRETER
        )
        if problem:
            engine.reason_file.write_text(f"wheel not fetched: {problem}", "utf-8")
            print(f"  {problem}")
            return
        unpacked = Path(folder) / "unpacked"
        _unpack(next(Path(folder).glob("*.whl")), unpacked)
        shutil.rmtree(engine.folder, ignore_errors=True)
        unpacked.rename(engine.folder)
    (engine.folder / ".done").touch()
    engine.reason_file.unlink(missing_ok=True)


def _download(engine: Engine, folder: Path, options: Sequence[str] = ()) -> str | None:
    """None, or the last line of pip's complaint."""
    command = f"{sys.executable} -m pip download --quiet --no-cache-dir --no-deps".split()
    command += ["--only-binary", ":all:", "--dest", str(folder), *options]
    command.append(f"{engine.package}=={engine.version}")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no wheel within {TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    complaints = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (complaints or ["pip failed"])[-1]


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py") and not name.startswith(LEFT_OUT):
                archive.extract(name, folder)


def make_venv() -> None:
    """A virtualenv with what the publishers import; the engines' own needs stay away from ours."""
    if (ROOT / "venv" / ".done").exists():
        return
    print("creating .engines/venv", flush=True)
    install = [str(PYTHON), "-m", "pip", "install", "--quiet", *PUBLISHER_NEEDS]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(ROOT / "venv")], check=True)
        subprocess.run(install, check=True, timeout=TIMEOUT_S)
    except (subprocess.SubprocessError, OSError) as problem:
        print(f"  no virtualenv for the publishers, their tests will be skipped: {problem}")
        return
    (ROOT / "venv" / ".done").touch()


if __name__ == "__main__":
    make_venv()
    for one in ENGINES:
        fetch(one)
