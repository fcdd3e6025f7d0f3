"""Ranks that do not get what was reserved for them: the caller does not pass the rank on.

A prompt of which the reserved rank had nothing is looked for once its engine must have published
it. If the rank does not hold it and another one of the same worker does, it went astray. Engines
with several data-parallel ranks behind one address balance by themselves what names no rank.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.types import HASH_BYTES, Scope, WorkerRank
from select_service.core.diagnostics import causes
from select_service.core.tenancy.shares import Shares
from select_service.core.tenancy.tenant_memory import TenantMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from indexer.core.index import KvIndex
    from select_service.core.diagnostics.causes import Cause
    from select_service.core.diagnostics.prompt_sample import PromptSample

SETTLE_S: Final = 30.0
"""An engine has published a prompt by then."""

AWAITED_MAX: Final = 256
"""Prompts looked for at a time, some 5 µs each."""

WORKERS_MAX: Final = 1024
"""Workers whose verdicts are kept."""

VERDICTS_MAX: Final = 32
"""Verdicts kept of each worker."""

VERDICTS_S: Final = 900.0
"""Older ones say nothing."""

STRAYS_MIN: Final = 4
"""Prompts that went astray until that is no accident: one may be cancelled, or evicted at once."""

_ONE_OF: Final = 4  # as many of the verdicts, at least; chance alone sends some to the right rank


class RankVerdict(NamedTuple):
    """Where a prompt was found."""

    at: float
    dp_rank: int  # for which it was reserved
    found_at: int  # the rank that holds it


class RankChecks:
    """Where the prompts of workers with several ranks end up."""

    def __init__(self, shares: Shares | None = None) -> None:
        shares = shares or Shares()
        self._awaited: TenantMemory[tuple[Scope, int, bytes], PromptSample] = TenantMemory(
            shares, "doctor_ranks_awaited", lambda: AWAITED_MAX
        )
        self._verdicts: TenantMemory[tuple[Scope, int], deque[RankVerdict]] = TenantMemory(
            shares, "doctor_rank_verdicts", lambda: WORKERS_MAX
        )

    def judge(self, sample: PromptSample) -> None:
        """Look for a prompt later, if its rank has to compute all of it."""
        if sample.new_blocks < sample.blocks:
            return
        tenant = sample.scope.tenant_id
        key = sample.scope, sample.worker_id, sample.beginning
        if not self._awaited.has(tenant, key):
            self._awaited.put(tenant, key, sample)

    def suspects(
        self, index_of: Callable[[Scope], KvIndex | None], now: float
    ) -> Iterator[tuple[tuple[Scope, WorkerRank], Cause, str] | None]:
        """Yield the ranks whose prompts go astray; None after each look, for pauses."""
        for key, sample in self._awaited.items():
            index = index_of(sample.scope)
            if index is None or now - sample.at >= SETTLE_S:
                self._awaited.pop(sample.scope.tenant_id, key)
                if index is not None:
                    self._find(sample, index)
                yield None
        for owner, verdicts in self._verdicts.items():
            while verdicts and now - verdicts[0].at > VERDICTS_S:
                verdicts.popleft()
            if not verdicts or index_of(owner[0]) is None:
                self._verdicts.pop(owner[0].tenant_id, owner)
                continue
            strays = [one for one in verdicts if one.found_at != one.dp_rank]
            if len(strays) >= STRAYS_MIN and len(strays) * _ONE_OF >= len(verdicts):
                last = strays[-1]
                what = (
                    f"{len(strays)} of {len(verdicts)} prompts were cached by another rank than "
                    f"the reserved one, the last one by {last.found_at} instead of {last.dp_rank}"
                )
                yield (owner[0], WorkerRank(owner[1], last.dp_rank)), causes.RANK_IGNORED, what

    def _find(self, sample: PromptSample, index: KvIndex) -> None:
        held = _held_by(index, sample)
        if not held:
            return  # it was not reported
        owner, tenant = (sample.scope, sample.worker_id), sample.scope.tenant_id
        verdicts = self._verdicts.get(tenant, owner)
        if verdicts is None:
            verdicts = deque(maxlen=VERDICTS_MAX)
            self._verdicts.put(tenant, owner, verdicts)
        found_at = sample.dp_rank if sample.dp_rank in held else min(held)
        verdicts.append(RankVerdict(sample.at, sample.dp_rank, found_at))


def _held_by(index: KvIndex, sample: PromptSample) -> set[int]:
    """Return the ranks of the sample's worker that hold the beginning of its prompt."""
    matches = index.find_matches(sample.beginning)
    blocks = len(sample.beginning) // HASH_BYTES
    whole = [mask for count, mask in matches.groups if count >= blocks]
    whole += [mask for _, mask in (*matches.host, *matches.disk)]
    ranks = (index.rank_of(int(slot)) for mask in whole for slot in matches.slots(mask))
    return {
        rank.dp_rank for rank in ranks if rank is not None and rank.worker_id == sample.worker_id
    }
