"""Names that exist in the service under `openapi_hooks.py`; `test_openapi.py` puts them there."""

from __future__ import annotations

from typing import Final

WORKERS: Final = (1 << 52, (1 << 52) + 1, (1 << 52) + 2)
"""The last one may be patched to pieces."""

RESERVATION: Final = "booked"
LEASE: Final = "open"
