"""One rank's map from engine hashes to nodes: compiled if available, otherwise a dict.

A dict with an int object per name takes some 100 bytes per block, the compiled map 24. Callers need
not know which of the two they have. Each `Holder` has one.
"""

from __future__ import annotations

from indexer.compiled import usable

if usable("indexer._names", 4):
    from indexer._names import NameMap
else:
    from indexer.core.plain_name_map import NameMap  # type: ignore[assignment]

__all__ = ["NameMap"]
