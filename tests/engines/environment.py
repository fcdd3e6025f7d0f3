"""An engine in a virtual environment of its own, made once and kept.

What cannot be had is noted beside it, and the tests that need it skip with that reason.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TIMEOUT_S: Final = 900


@dataclass(frozen=True)
class Environment:
    """Where one release of an engine is, and what makes it.

    Attributes:
        name: of the package.
        command: of `make`, which makes it.
        disk_bytes: what it takes while it is installed; a full disk would fail other tests, too.
        recipe: whatever decides what is installed; another one: it is installed anew.
        fill: installs it into the new environment; None, or what went wrong.
    """

    name: str
    version: str
    command: str
    disk_bytes: int
    recipe: tuple[object, ...]
    fill: Callable[[Environment], str | None]

    @property
    def folder(self) -> Path:
        return ROOT / f".venv-{self.command}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """The folder `site-packages`."""
        (packages,) = self.folder.glob("lib/python*/site-packages")
        return packages

    @property
    def why_missing(self) -> str | None:
        """None if it is there, else the reason."""
        if self._done.exists() and self._done.read_text("utf-8") == self._stamp:
            return None
        if self._reason.exists():
            return f"{self.name} {self.version}: {self._reason.read_text('utf-8')}"
        return f"{self.name} {self.version} is not installed; make {self.command} does"

    @property
    def _done(self) -> Path:
        return self.folder / ".done"

    @property
    def _reason(self) -> Path:
        return ROOT / ".engines" / f"{self.name}.reason"

    @property
    def _stamp(self) -> str:
        return hashlib.sha256(repr((self.version, *self.recipe)).encode()).hexdigest()

    def pip(self, *arguments: str) -> None:
        """Run its pip."""
        pip: Sequence[str | Path] = (self.python, "-m", "pip", "--quiet")
        quiet = "--disable-pip-version-check"
        subprocess.run([*pip, quiet, *arguments], check=True, timeout=TIMEOUT_S)

    def make(self) -> None:
        """Install it unless it is there."""
        if self.why_missing is None:
            print(f"have {self.name} {self.version}")
            return
        print(f"installing {self.name} {self.version} into {self.folder.name}", flush=True)
        self._reason.unlink(missing_ok=True)
        problem = self._install()
        if problem is None:
            self._done.write_text(self._stamp, "utf-8")
            return
        self._reason.parent.mkdir(exist_ok=True)
        self._reason.write_text(problem, "utf-8")
        print(f"no whole {self.command} here, its tests will be skipped: {problem}")

    def _install(self) -> str | None:
        free = shutil.disk_usage(ROOT).free
        if free < self.disk_bytes:
            return f"{free >> 20} MB are free, and {self.disk_bytes >> 20} are needed"
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", self.folder], check=True)
            return self.fill(self)
        except (subprocess.SubprocessError, OSError) as problem:
            return str(problem)
