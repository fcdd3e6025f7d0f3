"""`python -m select_service`, and where the console script `select-service` begins."""

from __future__ import annotations

import sys

from select_service import interrupts


def main() -> int:
    """Load the command, and run it; returns the exit code."""
    interrupts.end_at_once()
    try:
        from select_service import cli
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in {"select_service", "indexer"}:
            raise
        sys.exit(
            f"select-service: {error.name} is not installed for {sys.executable}: use "
            ".venv/bin/python where `make run` has made it, or `pip install .` in the checkout"
        )
    try:
        return cli.main()
    finally:
        interrupts.end_at_once()


if __name__ == "__main__":
    sys.exit(main())
