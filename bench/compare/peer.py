"""The reference service from PyPI, in a virtualenv of its own; an opponent, never a dependency."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["VERSIONS", "PeerMissing", "peer_pythons"]

VERSIONS = ("1.6.1", "1.3.1")
_PACKAGE = "ai-dynamo-runtime"
_ROOT = Path(__file__).resolve().parents[2]
_ASK_VERSION = f"from importlib.metadata import version; print(version({_PACKAGE!r}))"


class PeerMissing(RuntimeError):
    """The package cannot be installed or imported here."""


def peer_pythons(versions: tuple[str, ...]) -> dict[str, Path]:
    """Version → interpreter that has it.

    BENCH_PEER_PYTHON names existing interpreters (several joined by the path separator); whatever
    is not found there is installed into `.venv-peer-<version>` beside the sources.

    Raises:
        PeerMissing: an interpreter without the package, or an installation that failed.
    """
    given = os.environ.get("BENCH_PEER_PYTHON", "")
    found = {_version_of(Path(p)): Path(p) for p in given.split(os.pathsep) if p}
    return {version: found.get(version) or _install(version) for version in versions}


def _version_of(python: Path) -> str:
    answer = subprocess.run(
        [python, "-c", _ASK_VERSION], capture_output=True, text=True, check=False
    )
    if answer.returncode:
        raise PeerMissing(f"{python} has no {_PACKAGE}")
    return answer.stdout.strip()


def _install(version: str) -> Path:
    home = _ROOT / f".venv-peer-{version}"
    python = home / "bin" / "python"
    if python.exists() and _has(python, version):
        return python
    print(f"installing {_PACKAGE}=={version} into {home.name}", file=sys.stderr)
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(home)],
        [str(python), *pip, f"{_PACKAGE}=={version}"],
    ):
        if subprocess.run(command, check=False).returncode:
            raise PeerMissing(f"cannot install {_PACKAGE}=={version}: {' '.join(command)}")
    return python


def _has(python: Path, version: str) -> bool:
    try:
        return _version_of(python) == version
    except PeerMissing:
        return False
