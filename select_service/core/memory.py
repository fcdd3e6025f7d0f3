"""What has ended, remembered for a while: compiled if it can be.

The plain one takes some 250 bytes an entry, and keeps what was there beside it from being given
back; the compiled one 56 and the key. Which of the two it is, nobody needs to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexer.compiled import usable

if not TYPE_CHECKING and usable("select_service.core._memory", 2):
    from select_service.core._memory import Memory
else:
    from select_service.core.plain_memory import Memory

__all__ = ["Memory"]
