"""A state directory as a start finds it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from select_service.core.changes import StateKey
from select_service.edge.state import wal
from select_service.edge.state.store import PAGE, Store

Rows = dict[StateKey, bytes]
FRAME = wal.FRAME.size + PAGE


def key(number: int) -> StateKey:
    return ("reservation", f"id-{number}")


def opened(directory: Path) -> Store:
    store = Store(directory)
    store.lock()
    return store


def contents(store: Store) -> tuple[Rows, list[str]]:
    """Its rows, and what it reports as damage."""
    loaded = store.load()
    rows = {(row.kind, row.name): row.value for row in loaded.rows}
    assert len(rows) == len(loaded.rows)
    return rows, loaded.damage.what


def read(directory: Path) -> tuple[Rows, list[str]]:
    with closing(Store(directory)) as store:
        store.lock()
        return contents(store)
