"""`python -m select_service.simulator`, and where the console script `select-sim` begins."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from select_service import interrupts

if TYPE_CHECKING:
    from collections.abc import Callable


def _load() -> Callable[[], int]:
    from select_service.simulator import cli

    return cli.main


def main() -> int:
    """Load the command, and run it; returns the exit code."""
    return interrupts.run(_load)


if __name__ == "__main__":
    sys.exit(main())
