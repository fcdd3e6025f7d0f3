"""A few of the placed prompts, for the doctor: the first ones after each examination.

A placement reads `left` and, while it is above 0, adds a sample; all others pay for one comparison.
Only the beginning of a prompt is kept, until the next examination, or until it has been found out
why it never matches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

from indexer.core.packing import TOKEN_BYTES
from indexer.types import BASE_NAMESPACE, HASH_BYTES, Namespace
from select_service.core.tenancy.shares import Shares

if TYPE_CHECKING:
    from indexer.types import Scope
    from select_service.core.pricing.placement import Placement
    from select_service.core.pricing.prompt import Prompt
    from select_service.types import SelectRequest

BEGINNING_TOKENS: Final = 16
"""What of a prompt distinguishes it from others; the first token alone is the same for all."""

Form = Literal["tokens", "media", "hashes"]


class PromptSample(Struct, frozen=True, gc=False):
    """One prompt that was placed."""

    scope: Scope
    worker_id: int
    dp_rank: int
    at: float
    beginning: bytes  # hashes of its first blocks: one, or more if they are tiny
    blocks: int
    new_blocks: int  # that the index does not have for the chosen rank
    isl_tokens: int
    form: Form
    namespace: Namespace  # the request's; with hashes: unknown, and the base
    tokens: list[int]  # of that beginning and one more; only for prompts that came as tokens
    end: bytes = b""  # hash of its last block, to distinguish chains of blocks


class PromptSampler:
    """Takes samples while it may; each tenant of the token file has a part of them.

    Attributes:
        left: So many more until the next examination.
    """

    __slots__ = ("_most", "_tenants", "left", "samples")

    def __init__(self, shares: Shares | None = None) -> None:
        self.left = self._most = 0
        self.samples: list[PromptSample] = []
        self._tenants = (shares or Shares()).bound("doctor_samples_max", lambda: self._most)

    def take(
        self, scope: Scope, request: SelectRequest, prompt: Prompt, placement: Placement, now: float
    ) -> None:
        """Note a prompt; one without a whole block says nothing about caches."""
        if not prompt.block_hashes or not self._tenants.has_room(scope.tenant_id):
            return
        self._tenants.take(scope.tenant_id)
        self.left -= 1
        size = placement.worker.spec.block_size or 1
        blocks = max(1, BEGINNING_TOKENS // size)
        form = _form(request)
        named = form != "hashes"
        salt = request.cache_salt or request.cache_namespace or ""
        self.samples.append(
            PromptSample(
                scope,
                placement.worker.worker_id,
                placement.dp_rank,
                now,
                prompt.block_hashes[: blocks * HASH_BYTES],
                prompt.blocks,
                max(0, prompt.blocks - sum(placement.held)),
                prompt.isl_tokens,
                form,
                Namespace(request.lora_name or "", salt) if named else BASE_NAMESPACE,
                _first_tokens(request, blocks * size + 1) if form == "tokens" else [],
                end=prompt.block_hashes[-HASH_BYTES:],
            )
        )

    def drain(self, samples_max: int) -> list[PromptSample]:
        """Hand over what was taken, and take so many more from now on."""
        samples, self.samples = self.samples, []
        self.left = self._most = samples_max
        self._tenants.recount({})
        return samples


def _form(request: SelectRequest) -> Form:
    media = request.mm_routing_info
    if (media is not None and media.routing_token_ids) or request.block_mm_infos:
        return "media"
    return "hashes" if request.token_ids is None else "tokens"


def _first_tokens(request: SelectRequest, count: int) -> list[int]:
    tokens = request.token_ids
    if isinstance(tokens, bytes):
        return memoryview(tokens[: count * TOKEN_BYTES]).cast("I").tolist()
    return [] if tokens is None else list(tokens[:count])
