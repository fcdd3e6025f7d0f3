"""How far two runs of blocks agree: the one comparison that trees of runs live by.

Compiled where it can be (`indexer/compiled.py`): a prompt that ends inside a run that others go on
with is the common case, and slices are cut and compared again and again to find out where.
"""

from __future__ import annotations

from indexer.compiled import usable

if usable("indexer._speed", 2):
    from indexer._speed import common_blocks
else:
    from indexer.core.plain_runs import common_blocks

__all__ = ["common_blocks"]
