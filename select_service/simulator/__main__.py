"""`python -m select_service.simulator`, and where the console script `select-sim` begins."""

from __future__ import annotations

import sys

from select_service import interrupts


def main() -> int:
    """Load the command, and run it; returns the exit code."""
    interrupts.end_at_once()
    from select_service.simulator import cli

    try:
        return cli.main()
    finally:
        interrupts.end_at_once()


if __name__ == "__main__":
    sys.exit(main())
