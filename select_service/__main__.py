"""`python -m select_service`, and where the console script `select-service` begins."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from select_service import interrupts

if TYPE_CHECKING:
    from collections.abc import Callable


def _load() -> Callable[[], int]:
    try:
        from select_service import cli
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in {"select_service", "indexer"}:
            raise
        sys.exit(
            f"select-service: {error.name} is not installed for {sys.executable}: use "
            ".venv/bin/python where `make run` has made it, or `pip install .` in the checkout"
        )
    return cli.main


def main() -> int:
    """Load the command, and run it; returns the exit code."""
    return interrupts.run(_load)


if __name__ == "__main__":
    sys.exit(main())
