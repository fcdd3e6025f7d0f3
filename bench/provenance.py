"""Where a result comes from: machine, commit, versions, the load at the time."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["git", "provenance"]

_ROOT = Path(__file__).resolve().parents[1]
_OUR_LIBRARIES = ("httptools", "msgspec", "numpy", "pyzmq", "starlette", "uvicorn", "uvloop")


def provenance() -> dict[str, Any]:
    """Machine, commit and versions, taken now."""
    return {
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_model(),
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "load_average": os.getloadavg(),
        },
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "select_service", "indexer")),
        "python": platform.python_version(),
        "libraries": {name: importlib.metadata.version(name) for name in _OUR_LIBRARIES},
    }


def git(*arguments: str) -> str:
    """What git says about this repository; nothing where there is none."""
    answer = subprocess.run(
        ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
