"""The reference service from PyPI, each version in a virtualenv of its own; never a dependency.

Benchmarks, tests and `make peer` all find and install it here: `python -m bench.compare.peer 1.6.1`
prepares `.venv-peer-1.6.1` beside the sources, without a version the one of the contract.
PEER_PYTHON names interpreters that have it already (several joined by the path separator).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

__all__ = [
    "CONTRACT_VERSION",
    "NEWEST_VERSION",
    "VERSIONS",
    "PeerMissing",
    "command",
    "installed",
    "main",
    "peer_pythons",
]

CONTRACT_VERSION = "1.3.1"
"""The version whose answers are the contract: the opponent in tests."""

NEWEST_VERSION = "1.6.1"
"""The newest release on PyPI; 1.7.0 is there as development builds only, which answer alike."""

VERSIONS = (NEWEST_VERSION, CONTRACT_VERSION)
_PACKAGE = "ai-dynamo-runtime"
_ROOT = Path(__file__).resolve().parents[2]
_ASK_VERSION = f"""
import importlib.metadata, importlib.util
assert importlib.util.find_spec("dynamo._core")
print(importlib.metadata.version({_PACKAGE!r}))
"""
_ASK_TIMEOUT_S = 60


class PeerMissing(RuntimeError):
    """The package cannot be installed or imported here."""


def peer_pythons(versions: tuple[str, ...]) -> dict[str, Path]:
    """Version → interpreter that has it; what is missing is installed.

    Raises:
        PeerMissing: PEER_PYTHON names an interpreter without it, or an installation failed.
    """
    return {version: installed(version) or _install(version) for version in versions}


def installed(version: str) -> Path | None:
    """Return the interpreter that has this version, None without one; installs nothing.

    Raises:
        PeerMissing: PEER_PYTHON names an interpreter without the package.
    """
    for python in _given():
        found = _version_of(python)
        if found is None:
            raise PeerMissing(f"PEER_PYTHON: {python} has no {_PACKAGE}")
        if found == version:
            return python
    python = _home(version) / "bin" / "python"
    return python if _version_of(python) == version else None


def command(python: Path) -> tuple[str, ...]:
    """What starts the reference service, before its flags."""
    return (str(python), "-m", "dynamo.select_service")


def _given() -> list[Path]:
    return [Path(p) for p in os.environ.get("PEER_PYTHON", "").split(os.pathsep) if p]


def _home(version: str) -> Path:
    return _ROOT / f".venv-peer-{version}"


@functools.cache
def _version_of(python: Path) -> str | None:
    if not python.exists():
        return None
    answer = subprocess.run(
        [python, "-c", _ASK_VERSION],
        capture_output=True,
        text=True,
        timeout=_ASK_TIMEOUT_S,
        check=False,
    )
    return answer.stdout.strip() if answer.returncode == 0 else None


def _install(version: str) -> Path:
    home = _home(version)
    python = home / "bin" / "python"
    print(f"installing {_PACKAGE}=={version} into {home.name}", file=sys.stderr)
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for step in (
        [sys.executable, "-m", "venv", str(home)],
        [str(python), *pip, f"{_PACKAGE}=={version}"],
    ):
        if subprocess.run(step, check=False).returncode:
            raise PeerMissing(f"cannot install {_PACKAGE}=={version}: {' '.join(step)}")
    _version_of.cache_clear()
    if _version_of(python) != version:
        raise PeerMissing(f"{_PACKAGE}=={version} is installed and does not work")
    return python


def main(versions: tuple[str, ...]) -> int:
    """Prepare these versions; 1 with the reason when one cannot be had."""
    try:
        for version, python in peer_pythons(versions).items():
            print(f"{_PACKAGE} {version}: {python}")
    except PeerMissing as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or (CONTRACT_VERSION,)))
