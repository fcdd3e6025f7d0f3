"""The base of all sources: publishes everything it sees, counts failures, and knows its age."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from indexer.edge.backoff import Backoff
from select_service.kubernetes_api import RETRY_AFTER_MAX_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from select_service.core.fleet.roster import Unready

T = TypeVar("T")

_log = logging.getLogger("select_service")

BACKOFF_S: Final = 1.0
BACKOFF_MAX_S: Final = 30.0
"""Pause after a source failed, doubled up to the second number; half of it is left to chance."""


class SourceFailed(Exception):
    """A source cannot be read now; `kind` is a label for metrics.

    Args:
        kind: of the failure.
        why: for people.
        is_transient: nothing contradicts what is known; only the connection has failed.
        retry_after_s: the other side wants to be left alone for so long.
    """

    def __init__(
        self, kind: str, why: str, *, is_transient: bool = False, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(why)
        self.kind = kind
        self.is_transient = is_transient
        self.retry_after_s = min(retry_after_s, RETRY_AFTER_MAX_S)


class DiscoverySource(Generic[T]):
    """The latest state of one source; followers wait for `changed`.

    Attributes:
        name: shown in records and metrics.
        latest: everything it names that may be used; None before the first successful look.
        unready: workers that it names and that take no new work; read together with `latest`.
        updates: successful looks that published something.
        failures: failed looks, by kind; they leave the latest unchanged.
        rejected: invalid objects at present, and why they are rejected.
        shared: pods that were left out because another has their worker id, by that id.
        progress: changes whenever a watch brings something sensible.
        trouble: why the last look failed; empty: it did not.
        every_s: how often it is looked at, if all is well.
        clock: monotonic seconds.
    """

    def __init__(self, name: str, every_s: float = 0.0) -> None:
        self.name = name
        self.every_s = every_s
        self.latest: T | None = None
        self.unready: Mapping[int, Unready] = {}
        self.changed = asyncio.Event()
        self.updates = 0
        self.progress = 0
        self.failures: dict[str, int] = {}
        self.rejected: dict[str, str] = {}
        self.shared: dict[int, list[str]] = {}
        self.trouble = ""
        self.clock: Callable[[], float] = time.monotonic
        self._good_at = self.clock()

    @property
    def age_s(self) -> float:
        """Seconds since the source was last known to be as published, or since it was built."""
        return max(0.0, self.clock() - self._good_at)

    def keep_time(self, clock: Callable[[], float]) -> None:
        """Measure by another clock from now on."""
        self.clock, self._good_at = clock, clock()

    def is_good(self) -> None:
        """Note that the source was just read, or has reported that nothing else is new."""
        self._good_at = self.clock()
        self.trouble = ""

    def publish(self, everything: T) -> None:
        """Publish everything there is now."""
        self.updates += 1
        self.is_good()
        self.latest = everything
        self.changed.set()

    def fail(self, kind: str, why: str) -> None:
        """Count a failed look; each new problem is logged once."""
        self.failures[kind] = self.failures.get(kind, 0) + 1
        if why != self.trouble:
            _log.warning("discovery from %s: %s; the last good state stays", self.name, why)
            self.trouble = why

    def reject(self, rejected: dict[str, str]) -> None:
        """Record the objects that are invalid at present; each is logged once."""
        for name, why in rejected.items():
            if self.rejected.get(name) != why:
                _log.warning("%s from %s is no worker: %s", name, self.name, why)
        self.rejected = rejected

    async def run(self) -> None:
        """Look forever."""
        raise NotImplementedError


async def poll(
    source: DiscoverySource[T], look: Callable[[], Awaitable[None]], every_s: float
) -> None:
    """Look periodically, whatever the outcome."""
    while True:
        try:
            await look()
        except SourceFailed as error:
            source.fail(error.kind, str(error))
        await asyncio.sleep(every_s)


async def insist(
    source: DiscoverySource[T], look: Callable[[], Awaitable[None]], backoff_s: float = BACKOFF_S
) -> None:
    """Look repeatedly; failures lengthen the pauses, until a look has lasted.

    A connection that breaks after it has brought something is made again after a short pause.
    """
    backoff = Backoff(backoff_s, BACKOFF_MAX_S)
    while True:
        before, at_least_s, is_transient = source.progress, 0.0, False
        backoff.holds(source.clock())
        try:
            await look()
        except SourceFailed as error:
            source.fail(error.kind, str(error))
            is_transient, at_least_s = error.is_transient, error.retry_after_s
        except Exception as error:  # noqa: BLE001 - a bug must not end the looking
            _log.exception("discovery from %s failed through an error of ours", source.name)
            source.fail("internal", repr(error))
        backoff.broke(source.clock())
        if is_transient and source.progress != before:
            backoff.begin_anew()
        await asyncio.sleep(max(_jittered(backoff.next_s()), at_least_s))


def _jittered(pause_s: float) -> float:
    """Return a part of a pause: replicas that failed together must not come back together."""
    return pause_s * random.uniform(0.5, 1.0)
