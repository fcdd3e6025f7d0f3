"""Canary prompts: does an engine publish a known prompt under the names that this service gives it?

Pure. `canary_tokens` makes a prompt that was never sent before; the sender of it to an engine
finds in the index which rank holds it; `judge` names what differs. One block under the right name
proves block size, tokens, salt and pairing at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

from select_service.core.diagnostics import causes
from select_service.types.doctor import Subject

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from select_service.core.diagnostics.causes import Cause

CANARIES_MAX: Final = 4
"""Prompts sent to a rank that does not publish the first one: by then the service's own checks of
its stream say why."""

_BLOCKS: Final = 3
_LONG_BLOCK: Final = 256  # of larger ones, one has to do: the prompt must fit the model
_TOKENS_MIN: Final = 32
_TOKENS: Final = range(3, 100)
"""In every vocabulary, and no special ones in most."""

_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"

Kind = Literal["tokens", "salt", "chat"]

Suspect = tuple["Cause", Subject, str]
"""A cause, what it is about, and what was seen."""


class CanaryOutcome(Struct, frozen=True, kw_only=True):
    """What became of one canary prompt."""

    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    endpoint: str
    kind: Kind
    """Sent as token ids, the same with a `cache_salt`, or as a chat that the engine tokenizes."""
    trouble: str = ""
    """Why the engine has not computed it; "": it has."""
    holders: Sequence[tuple[int, int]] = ()
    """Worker and rank of all that hold its first block, by the index."""


def canary_tokens(block_size: int, rng: Random) -> list[int]:
    """Return a prompt of some whole blocks and one token more."""
    blocks = _BLOCKS if block_size <= _LONG_BLOCK else 1
    length = max(blocks * block_size, _TOKENS_MIN) + 1
    return [rng.choice(_TOKENS) for _ in range(length)]


def canary_text(block_size: int, rng: Random) -> str:
    """Return a text of at least so many tokens as `canary_tokens` has."""
    length = len(canary_tokens(block_size, rng))
    return " ".join("".join(rng.choices(_LETTERS, k=3)) for _ in range(length))


def judge(outcome: CanaryOutcome) -> Suspect | None:
    """Return what a canary prompt has found; None: the engine and this service agree."""
    me = outcome.worker_id, outcome.dp_rank
    if outcome.trouble:
        return _suspect(outcome, causes.CANARY_REFUSED, outcome.trouble)
    if me in outcome.holders:
        return None
    if outcome.holders:
        worker_id, rank = outcome.holders[0]
        if worker_id == outcome.worker_id:
            what = f"a prompt that was sent to rank {outcome.dp_rank} is announced by rank {rank}"
            return _suspect(outcome, causes.RANK_OFFSET, what)
        what = f"a prompt that was sent to its endpoint is announced by worker {worker_id}"
        return _suspect(outcome, causes.ENDPOINT_SHARED, what)
    cause, what = _UNTOLD[outcome.kind]
    return _suspect(outcome, cause, what)


_UNTOLD: Final[dict[Kind, tuple[Cause, str]]] = {
    "tokens": (
        causes.CANARY_NOT_FOUND,
        "it has computed a prompt of known tokens, and no block of it is in the index",
    ),
    "salt": (
        causes.SALT_MISMATCH,
        "a prompt is in the index without a cache_salt, and with one it is not",
    ),
    "chat": (
        causes.TEMPLATE_MISMATCH,
        "a prompt of known tokens is in the index, a chat under the tokens of /tokenize is not",
    ),
}


def _suspect(outcome: CanaryOutcome, cause: Cause, what: str) -> Suspect:
    subject = Subject(
        model_name=outcome.model_name,
        tenant_id=outcome.tenant_id,
        worker_id=outcome.worker_id,
        dp_rank=outcome.dp_rank,
        endpoint=outcome.endpoint,
    )
    return cause, subject, what
