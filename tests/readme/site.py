"""The documentation as a site: `python -m tests.readme.site` (or `make docs`) builds build/site.

mkdocs.yml says how. Documents are gathered in build/docs first, laid out as in the repository, so
that the links between them hold. With --strict, whatever MkDocs warns of is an error: a link or an
anchor that leads nowhere, a page that is not in the navigation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Final

from tests.readme.document import README

ROOT: Final = README.parent
GATHERED: Final = ROOT / "build" / "docs"
SITE: Final = ROOT / "build" / "site"
SOURCES: Final = (
    "*.md",
    "LICENSE",
    "bench/**/*.md",
    "bench/results/*.svg",
    "deploy/MIGRATION.md",
    "deploy/docs/*",
    "deploy/pictures/*",
    "deploy/reference/*.md",
    "examples/*/*.py",
    "examples/*/*.yaml",
    "select_service/simulator/engine_presets.py",
)


def gather() -> None:
    """Copy every document and picture to where MkDocs reads them."""
    shutil.rmtree(GATHERED, ignore_errors=True)
    for pattern in SOURCES:
        for file in ROOT.glob(pattern):
            copy = GATHERED / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def build() -> int:
    """Gather and build; returns the exit code of MkDocs."""
    gather()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement, for another site generator
    return subprocess.run(command, cwd=ROOT, env=os.environ | quiet, check=False).returncode


if __name__ == "__main__":
    sys.exit(build())
