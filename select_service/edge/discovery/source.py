"""The base of all sources: publishes everything it sees, and counts failures."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

_log = logging.getLogger("select_service")

BACKOFF_S: Final = 1.0
BACKOFF_MAX_S: Final = 30.0
"""Pause after a source failed, doubled up to the second number."""


class SourceFailed(Exception):
    """A source cannot be read now; `kind` is a label for metrics."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class Source(Generic[T]):
    """The latest state of one source; followers wait for `changed`.

    Attributes:
        name: shown in records and metrics.
        latest: everything it names; None before the first successful look.
        updates: successful looks that published something.
        failures: failed looks, by kind; they leave the latest unchanged.
        rejected: invalid objects at present, and why they are rejected.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.latest: T | None = None
        self.changed = asyncio.Event()
        self.updates = 0
        self.progress = 0  # changes whenever the other side sends something sensible
        self.failures: dict[str, int] = {}
        self.rejected: dict[str, str] = {}
        self._trouble = ""

    def publish(self, everything: T) -> None:
        """Publish everything there is now."""
        self.updates += 1
        self.progress += 1
        self._trouble = ""
        self.latest = everything
        self.changed.set()

    def fail(self, kind: str, why: str) -> None:
        """Count a failed look; each new problem is logged once."""
        self.failures[kind] = self.failures.get(kind, 0) + 1
        if why != self._trouble:
            _log.warning("discovery from %s: %s; the last good state stays", self.name, why)
            self._trouble = why

    def reject(self, rejected: dict[str, str]) -> None:
        """Record the objects that are invalid at present; each is logged once."""
        for name, why in rejected.items():
            if self.rejected.get(name) != why:
                _log.warning("%s from %s is no worker: %s", name, self.name, why)
        self.rejected = rejected

    async def run(self) -> None:
        """Look forever."""
        raise NotImplementedError


async def poll(source: Source[T], look: Callable[[], Awaitable[None]], every_s: float) -> None:
    """Look periodically, whatever the outcome."""
    while True:
        try:
            await look()
        except SourceFailed as error:
            source.fail(error.kind, str(error))
        await asyncio.sleep(every_s)


async def insist(
    source: Source[T], look: Callable[[], Awaitable[None]], backoff_s: float = BACKOFF_S
) -> None:
    """Look repeatedly; failures of any kind lengthen the pauses."""
    pause_s = backoff_s
    while True:
        before = source.progress
        try:
            await look()
        except SourceFailed as error:
            source.fail(error.kind, str(error))
        except Exception as error:  # noqa: BLE001 - a bug must not end the looking
            _log.exception("discovery from %s failed through an error of ours", source.name)
            source.fail("internal", repr(error))
        if source.progress != before:
            pause_s = backoff_s
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, BACKOFF_MAX_S)
