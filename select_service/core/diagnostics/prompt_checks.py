"""Prompts that recur and match nothing: whose blocks should be there, and why they are not.

A sample (`prompt_sample.py`) is judged if the same beginning was requested half a minute earlier:
by then an engine has reported it, and the index has it unless something is wrong. A hit clears its
scope and its rank of all suspicion, and so does a prompt that was reported and has gone again
since: what others evict was understood. Prompts that never match are tried in other ways, with the
salts and adapters that events carry, or shifted by a token: a way that matches is proof.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.core.extra_keys import is_ambiguous_salt, media_hash
from indexer.core.hashing import block_hashes
from indexer.types import BASE_NAMESPACE, HASH_BYTES, Namespace, Scope, WorkerRank
from select_service.core.diagnostics import causes
from select_service.core.tenancy.shares import Shares
from select_service.core.tenancy.tenant_memory import TenantMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from indexer.core.index import KvIndex
    from select_service.core.diagnostics.causes import Cause
    from select_service.core.diagnostics.prompt_sample import PromptSample

SETTLE_S: Final = 30.0
"""An engine has published a prompt by then: it waited, computed, and its step was published."""

SEEN_MAX: Final = 8192
"""Beginnings of prompts remembered, of scopes and of ranks; some 250 bytes each."""

AWAITED_MAX: Final = 256
"""Prompts looked for in each examination, some 5 µs each."""

OWNERS_MAX: Final = 4096
"""Scopes and ranks whose verdicts are kept."""

VERDICTS_MAX: Final = 32
"""Verdicts kept of each; as many misses in a row forget the last hit."""

VERDICTS_S: Final = 900.0
"""Older ones say nothing."""

MISREAD_S: Final = 300.0
"""A salt was taken for a media item no longer ago than this."""

MISSES_MIN: Final = 8
"""Prompts that came again and matched nothing, with none that matched, until that is odd."""

PROMPTS_MIN: Final = 3
"""Different ones among them: a probe that asks the same all day, and sends nothing, is none."""

TRIALS_MAX: Final = 4
"""Prompts that are tried in other ways."""

CHAINS_MAX: Final = 64
"""Newest sequences in the index whose salts and adapters are tried."""

NAMESPACES_MAX: Final = 8
"""Of those, salts and adapters that are tried."""


Owner = Scope | tuple[Scope, WorkerRank]


class PromptVerdict(NamedTuple):
    """A prompt that came again."""

    at: float
    is_hit: bool
    sample: PromptSample
    stored: int  # blocks the owner had ever reported by then


class PromptChecks:
    """What became of prompts that came again, by scope and by rank."""

    def __init__(self, shares: Shares | None = None) -> None:
        shares = shares or Shares()
        self._seen: TenantMemory[tuple[Owner, bytes], float] = TenantMemory(
            shares, "doctor_prompts_seen", lambda: SEEN_MAX
        )
        self._verdicts: TenantMemory[Owner, deque[PromptVerdict]] = TenantMemory(
            shares, "doctor_prompt_verdicts", lambda: OWNERS_MAX
        )
        self._misread: TenantMemory[Scope, tuple[int, float]] = TenantMemory(
            shares, "doctor_salts_misread", lambda: OWNERS_MAX
        )
        """Of a scope: prompts whose salt is, and the last."""
        self._awaited: TenantMemory[tuple[Owner, bytes], PromptSample] = TenantMemory(
            shares, "doctor_prompts_awaited", lambda: AWAITED_MAX
        )
        """The last prompts that missed, looked for until the engine must have published them."""

    def judge(self, sample: PromptSample, index: KvIndex, stored: Mapping[Owner, int]) -> None:
        """Look whether what a prompt needs is there, if it has been asked for before."""
        rank, tenant = WorkerRank(sample.worker_id, sample.dp_rank), sample.scope.tenant_id
        if is_ambiguous_salt(sample.namespace.cache_salt):
            if _holds(index, sample.beginning, None):
                self._misread.pop(tenant, sample.scope)
            elif _is_misread(index, sample):
                self._note_misread(sample)
                return  # the cause is known, whatever other prompts match
        for owner in (sample.scope, (sample.scope, rank)):
            key = (owner, sample.beginning)
            seen_at = self._seen.get(tenant, key)
            if seen_at is None:
                self._seen.put(tenant, key, sample.at)
            elif sample.at - seen_at >= SETTLE_S:
                slot = None if isinstance(owner, Scope) else index.slot_of(rank)
                is_hit = _holds(index, sample.beginning, slot)
                self._note(owner, sample, stored.get(owner, 0), is_hit=is_hit)
                if is_hit:
                    self._awaited.pop(tenant, key)
                else:
                    self._awaited.put(tenant, key, sample)

    def _find_awaited(
        self,
        index_of: Callable[[Scope], KvIndex | None],
        stored: Mapping[Owner, int],
        now: float,
    ) -> Iterator[None]:
        """Note a hit for what engines have published; it may be evicted before it recurs."""
        for key, sample in self._awaited.items():
            owner, beginning = key
            tenant = sample.scope.tenant_id
            index = index_of(sample.scope)
            if index is not None and now > sample.at:
                rank = WorkerRank(sample.worker_id, sample.dp_rank)
                slot = None if isinstance(owner, Scope) else index.slot_of(rank)
                if _holds(index, beginning, slot):
                    self._note(owner, sample, stored.get(owner, 0), is_hit=True)
                    self._awaited.pop(tenant, key)
                    continue
            if index is None or now - sample.at > SETTLE_S:
                self._awaited.pop(tenant, key)
            yield

    def _note_misread(self, sample: PromptSample) -> None:
        tenant = sample.scope.tenant_id
        count, _ = self._misread.get(tenant, sample.scope) or (0, 0.0)
        self._misread.put(tenant, sample.scope, (count + 1, sample.at))

    def _note(self, owner: Owner, sample: PromptSample, stored: int, *, is_hit: bool) -> None:
        tenant = sample.scope.tenant_id
        verdicts = self._verdicts.get(tenant, owner)
        if verdicts is None:
            verdicts = deque(maxlen=VERDICTS_MAX)
            self._verdicts.put(tenant, owner, verdicts)
        if is_hit and verdicts and verdicts[-1].is_hit:
            verdicts.pop()  # one hit is enough
        verdicts.append(PromptVerdict(sample.at, is_hit, sample, stored))

    def suspects(
        self,
        index_of: Callable[[Scope], KvIndex | None],
        stored: Mapping[Owner, int],
        is_past_missing: Callable[[Owner], bool],
        now: float,
    ) -> Iterator[tuple[Owner, Cause, str] | None]:
        """Yield ranks that match nothing, and why; None after each owner, for pauses.

        Of a scope that matches nothing at all its ranks are not named.
        """
        for scope, (count, at) in self._misread.items():
            if now - at > MISREAD_S or index_of(scope) is None:
                self._misread.pop(scope.tenant_id, scope)
            else:
                what = "1 prompt matches" if count == 1 else f"{count} prompts match"
                yield scope, causes.SALT_AMBIGUOUS, f"{what} if the salt is read as a media item"
        yield from self._find_awaited(index_of, stored, now)
        mute: set[Scope] = set()
        owners = [owner for owner, _ in self._verdicts.items()]
        owners.sort(key=lambda owner: not isinstance(owner, Scope))
        for owner in owners:
            yield None
            scope = _scope_of(owner)
            index = index_of(scope)
            if index is None:
                self._verdicts.pop(scope.tenant_id, owner)
                continue
            misses = self._misses(owner, stored.get(owner, 0), now)
            if scope in mute or not misses:
                continue
            if isinstance(owner, Scope):
                mute.add(scope)
            slot = None if isinstance(owner, Scope) else index.slot_of(owner[1])
            cause = _tried(index, misses, slot)
            if cause is None:
                cause = (
                    causes.PAST_EVENTS_MISSING
                    if is_past_missing(owner)
                    else _guessed(index, misses)
                )
            yield owner, cause, _described(misses)

    def _misses(self, owner: Owner, stored: int, now: float) -> list[PromptSample]:
        """The prompts of an owner that matches nothing although it publishes blocks; else none."""
        tenant = _scope_of(owner).tenant_id
        verdicts = self._verdicts.get(tenant, owner)
        if verdicts is None:
            return []
        while verdicts and now - verdicts[0].at > VERDICTS_S:
            verdicts.popleft()
        if not verdicts:
            self._verdicts.pop(tenant, owner)
            return []
        if any(one.is_hit for one in verdicts) or len(verdicts) < MISSES_MIN:
            return []
        if len({one.sample.beginning for one in verdicts}) < PROMPTS_MIN:
            return []
        # nothing reported since: no engine got a prompt, or `streams` will name the fault
        return [one.sample for one in verdicts] if stored > verdicts[0].stored else []


def _scope_of(owner: Owner) -> Scope:
    return owner if isinstance(owner, Scope) else owner[0]


def _holds(index: KvIndex, beginning: bytes, slot: int | None) -> bool:
    """Whether any rank, or the one behind a slot, holds the beginning of a prompt."""
    matches = index.find_matches(beginning)
    blocks = len(beginning) // HASH_BYTES
    whole = [mask for count, mask in matches.groups if count >= blocks]
    whole += [mask for _, mask in (*matches.host, *matches.disk)]  # these continue below the device
    if slot is None:
        return bool(whole)
    return any((matches.slots(mask) == slot).any() for mask in whole)


def _tried(index: KvIndex, misses: list[PromptSample], slot: int | None) -> Cause | None:
    """Find a way in which a prompt matches after all.

    Where events carry the very salt and adapter of a request both sides call them the same: that
    its tokens match under others as well is then a prompt that is sent under several.
    """
    found = sorted(index.newest_namespaces(CHAINS_MAX))[:NAMESPACES_MAX]
    for sample in [one for one in misses if one.tokens][-TRIALS_MAX:]:
        size = len(sample.beginning) // HASH_BYTES * index.block_size
        for namespace in () if sample.namespace in found else (BASE_NAMESPACE, *found):
            if namespace != sample.namespace and _would_match(
                index, sample.tokens[:size], namespace, slot
            ):
                is_adapter = namespace.lora_name != sample.namespace.lora_name
                return causes.LORA_MISMATCH if is_adapter else causes.SALT_MISMATCH
        if len(sample.tokens) > size and _would_match(
            index, sample.tokens[1:], sample.namespace, slot
        ):
            return causes.FIRST_TOKEN
    return None


def _is_misread(index: KvIndex, sample: PromptSample) -> bool:
    """Whether a prompt is in the index with its salt taken for a media item."""
    adapter, salt = sample.namespace
    mm_hash = media_hash(salt)
    if mm_hash is None or not sample.tokens:
        return False
    size = len(sample.beginning) // HASH_BYTES * index.block_size
    hashes = block_hashes(
        sample.tokens[:size],
        index.block_size,
        namespace=Namespace(adapter),
        mm_hashes=[[mm_hash]],
    )
    return _holds(index, hashes, None)


def _would_match(index: KvIndex, tokens: list[int], namespace: Namespace, slot: int | None) -> bool:
    return _holds(index, block_hashes(tokens, index.block_size, namespace=namespace), slot)


def _guessed(index: KvIndex, misses: list[PromptSample]) -> Cause:
    """The likeliest cause of what cannot be proven."""
    if any(one.form != "hashes" for one in misses):
        return causes.TOKEN_MISMATCH
    size = index.block_size
    if all(one.isl_tokens // size != one.blocks for one in misses):
        return causes.REQUEST_BLOCK_SIZE
    return causes.HASH_MISMATCH


def _described(misses: list[PromptSample]) -> str:
    different = len({one.beginning for one in misses})
    return f"{len(misses)} prompts came again ({different} different ones), and none matched"
