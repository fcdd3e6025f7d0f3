"""Keeps the garbage collector from holding the loop: what has been looked at once is left alone.

CPython 3.11 to 3.13 look through every container object of the process in one go whenever a quarter
has been added; 20,000 reservations make that 100 ms, and it grows with them. The service frees what
it frees by reference counts: nothing it keeps is part of a cycle by the time it is let go (a test
drives it and counts). So every full collection is made early, on few objects, and what survives it
is frozen. Only for a process of our own: an embedding one has its own garbage.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["early_collections"]

THRESHOLDS: Final = (700, 2, 0)
"""Objects until a young collection, those until a middle one, and those until a full one: some
thousands of new objects are looked through at a time, in a fraction of a millisecond."""


_FULL: Final = 2


@contextlib.contextmanager
def early_collections() -> Iterator[None]:
    """Freeze what lives now, and from now on what has survived a full collection."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.callbacks.append(_freeze_survivors)
    try:
        yield
    finally:
        gc.callbacks.remove(_freeze_survivors)
        gc.set_threshold(*before)
        gc.unfreeze()


def _freeze_survivors(phase: str, facts: dict[str, int]) -> None:
    if phase == "stop" and facts["generation"] == _FULL:
        gc.freeze()
