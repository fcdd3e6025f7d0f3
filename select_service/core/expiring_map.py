"""Ended things, remembered for a while: compiled if available.

The plain version takes some 250 bytes per entry, and its scattered objects keep memory around them
from being freed; the compiled one takes 56 and the key. Callers need not know which they have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexer.compiled import usable

if not TYPE_CHECKING and usable("select_service.core._expiring_map", 2):
    from select_service.core._expiring_map import ExpiringMap
else:
    from select_service.core.plain_expiring_map import ExpiringMap

__all__ = ["ExpiringMap"]
