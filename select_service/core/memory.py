"""Ended things, remembered for a while: compiled if available.

The plain version takes some 250 bytes per entry, and its scattered objects keep memory around them
from being freed; the compiled one takes 56 and the key. Callers need not know which they have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexer.compiled import usable

if not TYPE_CHECKING and usable("select_service.core._memory", 2):
    from select_service.core._memory import Memory
else:
    from select_service.core.plain_memory import Memory

__all__ = ["Memory"]
