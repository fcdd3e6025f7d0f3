"""A disk that refuses, or stands still, when a test says so."""

import sqlite3
import threading
from typing import Any

import pytest
from msgspec.structs import replace

from select_service.edge.driver.driver import Driver
from select_service.edge.state import journal as journal_module
from tests.wait import until


class Disk:
    """A store whose commits fail on demand, as SQLite does."""

    def __init__(self, service: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        assert service.keeper is not None
        monkeypatch.setattr(journal_module, "RETRY_S", 0.01)
        self.journal = service.keeper.journal
        self._commit = self.journal.store.commit
        self._limits = self.journal.limits
        self.code: int | None = None
        self.moves = threading.Event()
        self.moves.set()
        monkeypatch.setattr(self.journal.store, "commit", self.commit)

    def commit(self, batch: Any) -> None:
        self.moves.wait()
        if self.code is not None:
            error = sqlite3.OperationalError("injected")
            error.sqlite_errorcode = self.code
            raise error
        self._commit(batch)

    def stops(self) -> None:
        """Stand still, and soon count as stalled; before and after, a slow writer does not."""
        self.journal.limits = replace(self._limits, stall_s=0.05)
        self.moves.clear()
        if self.journal._watch is not None:  # it would first look when the former limit is over
            self.journal._watch.cancel()
            self.journal._look()

    def goes_on(self) -> None:
        self.journal.limits = self._limits
        self.moves.set()

    async def heals(self) -> None:
        self.code = None
        await until(lambda: self.journal.refusal is None)
