"""`python -m select_service.planner`, and where the console script `select-planner` begins."""

from __future__ import annotations

import sys
from importlib import import_module

from select_service import interrupts


def main() -> int:
    """Load the command, and run it; returns the exit code."""
    return interrupts.run(lambda: import_module("select_service.planner.cli").main)


if __name__ == "__main__":
    sys.exit(main())
