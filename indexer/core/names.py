"""What one rank's engine hashes stand for: the map from names to nodes, compiled if it can be.

The plain map takes some 100 bytes a block, as a dict with an int object per name must; the
compiled one 24. Which of the two it is, nobody needs to know.
"""

from __future__ import annotations

from indexer.compiled import usable

if usable("indexer._names", 3):
    from indexer._names import NameMap
else:
    from indexer.core.plain_names import NameMap  # type: ignore[assignment]

__all__ = ["NameMap"]
