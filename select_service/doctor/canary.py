"""Canary prompts on behalf of the command line; `canaries.py` sends them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from select_service.canaries import EVENTS_S, Canaries, CannotLook, targets_of
from select_service.client import ClientError, ServiceError
from select_service.core.diagnostics.parity import judge
from select_service.tokenization.engine_tokenizer import AnyUrl
from select_service.types import OverlapScores
from select_service.types.doctor import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from select_service.client import AsyncClient
    from select_service.doctor.query import ReachableWorker
    from select_service.types import OverlapScoresRequest


class CanaryReport(NamedTuple):
    """What all canary prompts have found, of the ranks of workers that can be chosen."""

    ranks: int
    asked: int
    """Those behind whose endpoint an OpenAI server answers; others get no canary."""
    agree: int
    """Those that report it under the names of this service."""
    findings: list[Finding]

    @property
    def text(self) -> str:
        """The sentence for people."""
        text = f"Canary prompts: {self.agree} of {self.asked} ranks report them as expected."
        if self.asked < self.ranks:
            text += f" {self.ranks - self.asked} more have no OpenAI server, and were sent none."
        return text


async def send_canaries(
    client: AsyncClient,
    workers: Iterable[ReachableWorker],
    timeout_s: float,
    events_s: float = EVENTS_S,
) -> CanaryReport:
    """Ask every rank that can be chosen to compute prompts, and look which report them.

    Args:
        client: of the service.
        workers: as the service lists them.
        timeout_s: longest wait for an engine's answer.
        events_s: longest wait for its events after that.

    Raises:
        CannotLook: the service may not be asked; nothing was sent to any engine.
    """

    async def look(request: OverlapScoresRequest) -> OverlapScores:
        asked = msgspec.to_builtins(request, builtin_types=(bytes,))
        body = {name: value for name, value in asked.items() if value is not None}
        try:
            return await client.call("POST", "/overlap_scores", body, OverlapScores)
        except (ServiceError, ClientError) as error:
            raise CannotLook(str(error)) from error

    targets = [
        target
        for worker in workers
        if worker.lifecycle == "schedulable" and worker.reports_cache
        for target in targets_of(worker, worker.tenant_id)
    ]
    canaries = Canaries(look, AnyUrl(), timeout_s=timeout_s, events_s=events_s)
    found = await canaries.send(targets)
    findings = [
        Finding(cause.code, cause.severity, subject, what, cause.why, cause.remedy, 0.0)
        for outcomes in found
        for cause, subject, what in filter(None, map(judge, outcomes))
    ]
    agree = sum(bool(outcomes) and not any(map(judge, outcomes)) for outcomes in found)
    return CanaryReport(len(targets), sum(map(bool, found)), agree, findings)
