"""The compiled way of the events, where it was built and is wanted."""

from __future__ import annotations

import os
from typing import Any

native: Any = None
"""`indexer._ingest`, or None where plain Python does all."""

if not os.environ.get("SELECT_SERVICE_PURE"):
    try:
        from indexer import _ingest as native
    except ImportError:
        pass
