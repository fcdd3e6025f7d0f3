"""Sends new workers canary prompts (`--doctor-probe-workers`), for the doctor.

A rank is asked when it can be chosen for the first time, and again whenever its record changes or
while something was found. Nothing is decided here: `canaries.py` sends, and
`core/diagnostics/parity.py` judges.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from select_service.canaries import ENGINES_AT_ONCE, Canaries, CannotLook, targets_of
from select_service.core.diagnostics.parity import judge
from select_service.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from select_service.canaries import CanaryTarget
    from select_service.core.diagnostics.parity import CanaryOutcome, Suspect
    from select_service.core.service import SelectionCore
    from select_service.tokenization.engine_tokenizer import UrlResolver
    from select_service.types import OverlapScores, OverlapScoresRequest

INTERVAL_S: Final = 5.0

AGAIN_S: Final = 30.0
"""After so long a rank is asked again that was not there yet, or of which something was found."""

_log = logging.getLogger("select_service")

Key = tuple["CanaryTarget", str, bool]
"""A rank with all that decides how it is published: its events endpoint, and whether by pairs."""


class CanaryWatch:
    """What canary prompts have found, by rank."""

    def __init__(
        self,
        core: SelectionCore,
        urls: UrlResolver,
        clock: Callable[[], float],
        canaries: Canaries | None = None,
    ) -> None:
        """Send nothing yet.

        Args:
            core: the state of the process.
            urls: says which endpoints may be asked.
            clock: monotonic seconds.
            canaries: sends; default: with the usual waits.
        """
        self._core, self._clock = core, clock
        self._canaries = canaries or Canaries(self._look, urls)
        self._found: dict[Key, list[Suspect]] = {}
        self._due: dict[Key, float] = {}  # when to ask again; infinite: never

    def suspects(self) -> Sequence[Suspect]:
        """Return all that was found, of ranks that are still as they were."""
        return [one for found in self._found.values() for one in found]

    async def watch(self) -> None:
        """Ask forever."""
        while True:
            try:
                await self.turn()
            except Exception:  # noqa: BLE001 - a bug must not end it
                _log.exception("canary prompts could not be sent")
            await asyncio.sleep(INTERVAL_S)

    async def turn(self) -> None:
        """Ask some of the ranks that are due."""
        ranks = self._ranks()
        for gone in self._due.keys() - ranks.keys():
            del self._due[gone]
            self._found.pop(gone, None)
        now = self._clock()
        asked = [key for key in ranks if self._due.get(key, now) <= now][:ENGINES_AT_ONCE]
        if not asked:
            return
        outcomes = await self._canaries.send([ranks[key] for key in asked])
        for key, outcome in zip(asked, outcomes, strict=True):
            self._note(key, outcome)

    def _ranks(self) -> dict[Key, CanaryTarget]:
        """Return the ranks that can be chosen and publish their caches."""
        found: dict[Key, CanaryTarget] = {}
        for worker in self._core.catalog:
            if worker.lifecycle != "schedulable" or worker.kv_events != "engine":
                continue
            events = worker.event_sources
            for target in targets_of(worker.spec, worker.scope.tenant_id):
                key = (target, events.get(target.dp_rank, ""), bool(worker.spec.is_eagle))
                found[key] = target
        return found

    def _note(self, key: Key, outcomes: Sequence[CanaryOutcome]) -> None:
        found = [one for one in map(judge, outcomes) if one is not None]
        self._found[key] = found
        is_settled = bool(outcomes) and not found
        self._due[key] = float("inf") if is_settled else self._clock() + AGAIN_S

    async def _look(self, request: OverlapScoresRequest) -> OverlapScores:
        try:
            return self._core.queries.overlap_scores(request)
        except ServiceError as error:
            raise CannotLook(str(error)) from error
