"""`python -m select_service`: the same as the console script `select-service`."""

from __future__ import annotations

import sys

try:
    from select_service.cli import main
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] in {"select_service", "indexer"}:
        raise
    sys.exit(
        f"select-service: {error.name} is not installed for {sys.executable}: use .venv/bin/python "
        "where `make run` has made it, or `pip install .` in the checkout"
    )

sys.exit(main())
