"""How far two runs of blocks agree: the one comparison that trees of runs depend on.

Compiled where possible (`indexer/compiled.py`): prompts commonly end inside a run that others
continue, and finding out where takes many slices and comparisons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexer.compiled import usable

if not TYPE_CHECKING and usable("indexer._speed", 3):
    from indexer._speed import common_blocks
else:
    from indexer.core.plain_runs import common_blocks

__all__ = ["common_blocks"]
