"""Reads a request against the current state: its partition, its normalised prompt, its weights.

Every operation starts here, so this fixes the order in which a request's faults are reported; the
refusals of prompts are part of the contract, texts included. Tokens, media and ready-made hashes
get one normal form, of which a request's fingerprint is made, too: repeats are known by it. Nothing
is decided, and only counters change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import xxhash
from msgspec import UNSET

from indexer.compiled import usable
from indexer.core.hashing import block_hashes, sequence_hashes
from indexer.core.packing import TOKEN_BYTES, pack_tokens, pack_u64, unpack_tokens
from indexer.types import HASH_BYTES, U64_MASK, Namespace
from select_service.core.fleet.eligibility import check_wishes
from select_service.core.ledger.demand_tally import UnservedDemand
from select_service.core.pricing.prompt import Prompt, prompt_of
from select_service.core.pricing.weights import weights_in_force
from select_service.errors import (
    InvalidField,
    InvalidRequest,
    NoSchedulableWorker,
    TooManyTokens,
)
from select_service.types import PromptFields, SelectRequest

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from indexer.types import PackedHashes, Scope
    from select_service.core.fleet.pins import Pins
    from select_service.core.fleet.unschedulable import UnschedulableWorkers
    from select_service.core.partition import Partition
    from select_service.core.pricing.weights import Weights
    from select_service.types import (
        BlockMmInfo,
        CoreLimits,
        HashList,
        RouterConfig,
        RouterConfigOverride,
    )

    P = TypeVar("P", bound=PromptFields)

if usable("select_service._speed", 9):
    from select_service._speed import msgpack_tokens as _msgpack_tokens

    msgpack_tokens: Callable[[bytes], bytes] | None = _msgpack_tokens
else:
    msgpack_tokens = None

TOKENS_MAX: Final = (1 << 63) - 1
"""Unlimited: embedders set their own limit."""

_AS_THEY_ARE: Final = frozenset({bytes, type(None)})

_in_order: Final = msgspec.msgpack.Encoder(order="deterministic").encode
"""Packs a request for its fingerprint: members of objects have no order."""

_KINDS: Final[dict[type, tuple[bytes, bool, bool]]] = {}
"""By request type, of which there are a handful: its name, whether it may ask for an explanation,
and whether it has a prompt. `isinstance` would take 750 instructions."""

_HASH_REST: Final = HASH_BYTES - 1
_OVERRIDES_MAX: Final = 256
"""Distinct overrides whose weights are cached; at the limit the cache starts anew."""


class RequestReader:
    """Reads requests against the current workers and configuration."""

    def __init__(
        self,
        config: RouterConfig,
        partitions: Mapping[Scope, Partition],
        pins: Pins,
        held_back: UnschedulableWorkers,
        limits: CoreLimits,
        rng: random.Random,
    ) -> None:
        self._limits = limits
        self._rng = rng
        self.config = config
        self.schedulable = 0
        """Schedulable workers in the whole process."""
        self.strayed = 0
        """Requests for a scope without workers while other scopes had some."""
        self.strayed_to: Scope | None = None
        """The scope of the last of them."""
        self.unserved = UnservedDemand(limits)
        """Requests for scopes without a worker."""
        self._partitions, self._pins, self._held_back = partitions, pins, held_back
        self._overridden: dict[tuple[float | bool | None, ...], Weights] = {}
        self.weights = weights_in_force(config, None)
        """The weights of requests without an override."""

    def selection(  # noqa: C901, PLR0912 - one straight path, as every request pays for it
        self, request: SelectRequest, partition: Partition | None = None
    ) -> tuple[Partition, Prompt, Weights]:
        """Read a selection request; its prompt's first form wins: media tokens, tokens, hashes.

        A `partition` that was found already, by `prompt` and `view`, need not select.

        Raises:
            ServiceError: of the scope, the prompt, or what it wishes for.
            InvalidRequest: of the prompt, with the texts of the contract, in its order of
                complaint.
            InvalidField: a hash outside 64 bits.
            TooManyTokens: the prompt exceeds the limit.
        """
        selects = partition is None
        if partition is None:
            tenant = request.tenant_id  # as `request.scope`, at a fraction of the cost
            if tenant is UNSET:
                tenant = request.routing_group
            key = request.model_name, "default" if tenant is UNSET else tenant
            partition = self._partitions.get(key)  # type: ignore[call-overload] # equal to its scope
            if partition is None or not partition.fleet_slots.workers:
                try:
                    partition = self.usable(request)
                except NoSchedulableWorker:
                    self.unserved.note(request.scope, is_known=self._is_known(request.scope))
                    raise
        index, override = partition.index, request.router_config_override
        most, prompt = self._limits.tokens_per_request_max, None
        if request.token_ids is not None or request.mm_routing_info is not None:
            prompt = _read_tokens(request, index.block_size, most, is_eagle=index.is_eagle)
        if prompt is None:
            local, chain = request.block_hashes, request.sequence_hashes
            isl_tokens = request.isl_tokens
            if local is None or chain is None or not isl_tokens:
                raise _incomplete(request)
            if type(local) is not bytes or type(chain) is not bytes:  # not from the codec
                _check_counts(local, chain, index.block_size, most)
                local, chain = _pack(local, "block_hashes"), _pack(chain, "sequence_hashes")
            size = len(local)
            blocks = size // HASH_BYTES
            if size != len(chain) or size & _HASH_REST or blocks * index.block_size > most:
                _check_counts(local, chain, index.block_size, most)
            prompt = Prompt(local, chain, isl_tokens, blocks, chain[:HASH_BYTES])
        weights = self.weights if override is None else self.overridden(override)
        if override is not None or not self.config.assume_kv_reuse:
            prompt = self.set_apart(request, prompt)
        if selects and request.pinned_worker is not None:
            check_wishes(request)
        return partition, prompt, weights

    def prompt(self, request: PromptFields) -> tuple[Partition, Prompt, Weights]:
        """Read a request with a prompt, of any kind.

        Raises:
            ServiceError: of the scope or the prompt.
        """
        return self.selection(request, self.usable(request))  # type: ignore[arg-type] # as it may

    def view(self, request: PromptFields) -> tuple[Partition, Prompt, Weights]:
        """Read a request that looks at all ranks with a prompt, those that drain included.

        Raises:
            ServiceError: of the scope or the prompt.
        """
        return self.selection(request, self.attached(request))  # type: ignore[arg-type] # as it may

    def set_apart(self, request: PromptFields, prompt: Prompt) -> Prompt:
        """Return the prompt with sequence hashes that no other has, if reuse is not assumed.

        Only of prompts in tokens: hashes of the caller are taken as they are, as in Dynamo 1.6.
        """
        override = request.router_config_override
        reuses = None if override is None else override.assume_kv_reuse
        if reuses is None:
            reuses = self.config.assume_kv_reuse
        if reuses or not prompt.blocks:
            return prompt
        media = request.mm_routing_info
        if request.token_ids is None and (media is None or not len(media.routing_token_ids)):
            return prompt
        own = pack_u64([self._rng.getrandbits(64), *range(1, prompt.blocks)])
        return prompt_of(prompt.block_hashes, sequence_hashes(own), prompt.isl_tokens)

    def draining(self, request: PromptFields) -> Partition | None:
        """Return the requested partition if all its workers drain: its reservations live on."""
        partition = self._partitions.get(request.scope)
        drains = (
            partition is not None
            and partition.fleet_slots.present
            and not partition.fleet_slots.workers
        )
        return partition if drains else None

    def attached(self, request: PromptFields) -> Partition:
        """Return the requested partition, even if all its workers drain.

        Raises:
            NoSchedulableWorker: it has no worker.
        """
        partition = self._partitions.get(request.scope)
        return (
            partition
            if partition is not None and partition.fleet_slots.present
            else self.usable(request)
        )

    def usable(self, request: PromptFields) -> Partition:
        """Return the requested partition.

        Raises:
            NoSchedulableWorker: it has no worker.
        """
        scope = request.scope
        if not self.schedulable:
            raise NoSchedulableWorker.anywhere(
                self._held_back.reasons(scope),
                is_known=self._is_known(scope) or None,  # others may not have come yet, either
            )
        partition = self._partitions.get(scope)
        if partition is None or not partition.fleet_slots.workers:
            # else it was the operator's wish
            if partition is None or not partition.fleet_slots.present:
                self.strayed += 1
                self.strayed_to = scope
            is_known = self._is_known(scope)
            raise NoSchedulableWorker.in_scope(
                scope, self._held_back.reasons(scope), is_known=is_known
            )
        return partition

    def _is_known(self, scope: Scope) -> bool:
        """Whether the scope has or had a worker here, schedulable or not."""
        return (
            scope in self._partitions
            or self._held_back.holds(scope)
            or self._pins.get(scope) is not None
        )

    def weights_for(self, request: PromptFields) -> Weights:
        """Return the weights of a request: its override on top of the process's configuration."""
        override = request.router_config_override
        return self.weights if override is None else self.overridden(override)

    def overridden(self, override: RouterConfigOverride) -> Weights:
        """Return the weights in force for an override; a fleet uses few distinct ones."""
        key = (
            override.overlap_score_credit,
            override.prefill_load_scale,
            override.overlap_score_weight,
            override.router_temperature,
            override.track_prefill_tokens,
        )
        known = self._overridden.get(key)
        if known is None:
            if len(self._overridden) >= _OVERRIDES_MAX:
                self._overridden.clear()
            known = self._overridden[key] = weights_in_force(self.config, override)
        return known


def read_booking(
    request: PromptFields, *, block_size: int, is_eagle: bool, tokens_max: int = TOKENS_MAX
) -> Prompt:
    """Normalise the prompt of an explicit reservation; block hashes are not required.

    Raises:
        InvalidRequest: with the texts of the contract, in its order of complaint.
        InvalidField: a hash outside 64 bits.
        TooManyTokens: the prompt exceeds the limit.
    """
    tokens = _read_tokens(request, block_size, tokens_max, is_eagle=is_eagle)
    if tokens is not None:
        return tokens
    if request.sequence_hashes is None:
        raise _missing("sequence_hashes")
    if request.isl_tokens is None:
        raise _missing("isl_tokens")
    _check_unread(request.block_hashes, "block_hashes")
    blocks = _count(request.sequence_hashes, HASH_BYTES, "sequence_hashes")
    if blocks * block_size > tokens_max:
        raise TooManyTokens("sequence_hashes", tokens_max)
    return prompt_of(b"", _pack(request.sequence_hashes, "sequence_hashes"), request.isl_tokens)


def _read_tokens(
    request: PromptFields, block_size: int, tokens_max: int, *, is_eagle: bool
) -> Prompt | None:
    media = request.mm_routing_info
    if media is not None and len(media.routing_token_ids):
        token_ids: list[int] | bytes | None = media.routing_token_ids
        infos: Sequence[BlockMmInfo | None] | None = media.block_mm_infos
    else:
        token_ids, infos = request.token_ids, request.block_mm_infos
    if token_ids is None:
        return None
    if not len(token_ids):  # works for arrays, too
        raise _empty()
    _check_unread(request.block_hashes, "block_hashes")
    _check_unread(request.sequence_hashes, "sequence_hashes")
    tokens = _count(token_ids, TOKEN_BYTES, "token_ids")
    if tokens > tokens_max:  # checked before hashing
        raise TooManyTokens("token_ids", tokens_max)
    local = block_hashes(
        token_ids,
        block_size,
        namespace=Namespace(
            request.lora_name or "", request.cache_salt or request.cache_namespace or ""
        ),
        is_eagle=is_eagle if request.is_eagle is None else request.is_eagle,
        mm_hashes=_media_hashes(infos) if infos else None,
    )
    return prompt_of(local, None, tokens)


def _media_hashes(infos: Sequence[BlockMmInfo | None]) -> list[list[int]]:
    return [[] if info is None else [item.mm_hash for item in info.mm_objects] for info in infos]


def _count(numbers: list[int] | bytes, width: int, field: str) -> int:
    """Return the number of values; packed ones must be complete."""
    if not isinstance(numbers, bytes):
        return len(numbers)
    count, rest = divmod(len(numbers), width)
    if rest:
        raise InvalidField(f"{field}: packed numbers take {width} bytes each", field=field)
    return count


def _pack(hashes: HashList, field: str) -> PackedHashes:
    if isinstance(hashes, bytes):
        return hashes
    try:
        return pack_u64(hashes)
    except ValueError as error:
        raise InvalidField(f"{field}: {error}", field=field) from None


def _check_unread(hashes: HashList | None, field: str) -> None:
    """Check that hashes not needed in this form of the prompt are 64 bits wide all the same."""
    if hashes is None or not len(hashes):
        return
    if isinstance(hashes, bytes):
        _count(hashes, HASH_BYTES, field)
    elif max(hashes) > U64_MASK:
        raise InvalidField(f"{field}: must be at most 2^64-1", field=field)


def _missing(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is required without token_ids", field=field)


def _incomplete(request: PromptFields) -> InvalidRequest:
    """Return the complaint about a prompt without tokens that lacks some of the rest."""
    for name in ("block_hashes", "sequence_hashes", "isl_tokens"):
        if getattr(request, name) is None:
            return _missing(name)
    return _empty()


def _check_counts(local: HashList, chain: HashList, block_size: int, tokens_max: int) -> None:
    """Complain about hashes that are cut off, not as many of each, or too many."""
    blocks = _count(local, HASH_BYTES, "block_hashes")
    sequence = _count(chain, HASH_BYTES, "sequence_hashes")
    if blocks != sequence:
        raise InvalidRequest(
            f"block_hashes length {blocks} must match sequence_hashes length {sequence}",
            field="block_hashes",
        )
    if blocks * block_size > tokens_max:
        raise TooManyTokens("block_hashes", tokens_max)


def _empty() -> InvalidRequest:
    return InvalidRequest("isl_tokens must be greater than 0", field="isl_tokens")


# -- fingerprints ----------------------------------------------------------------------------------


def fingerprint_of(request: msgspec.Struct, unknown: bytes) -> bytes:
    """Return 16 bytes that two requests share iff they are the same body on the same route.

    Signed and unsigned spellings of one hash are the same. 1 µs for 128 blocks.

    State directories keep fingerprints, and the next version must compute the same for a repeat: a
    member added to a request from now on must default to UNSET, and is written only if set.

    `unknown` are the canonical bytes of the unknown members. A request built in this process
    has lists that are already validated.
    """
    kind = type(request)
    known = _KINDS.get(kind)
    if known is None:
        may_explain, has_prompt = issubclass(kind, SelectRequest), issubclass(kind, PromptFields)
        known = _KINDS[kind] = kind.__name__.encode(), may_explain, has_prompt
    route, may_explain, has_prompt = known
    if may_explain and request.explain is not UNSET:  # type: ignore[attr-defined]
        request = msgspec.structs.replace(request, explain=UNSET)  # does not affect the booking
    if has_prompt and not (  # the form in which the codec delivers nearly all
        request.mm_routing_info is None  # type: ignore[attr-defined]
        and type(request.sequence_hashes) in _AS_THEY_ARE  # type: ignore[attr-defined]
        and type(request.block_hashes) in _AS_THEY_ARE  # type: ignore[attr-defined]
        and type(request.token_ids) in _AS_THEY_ARE  # type: ignore[attr-defined]
    ):
        request = packed(request)  # type: ignore[type-var]
    return xxhash.xxh3_128_digest(route + _in_order(request) + unknown)


def packed(request: P) -> P:
    """Return the request with its long lists packed, as the codec delivers them: one form for all.

    Exception: token lists with media stay lists, as they were before packing was introduced,
    because fingerprints, the use of this function, outlive the process. The lists must have been
    validated, as `RequestReader.selection` does.
    """
    media = request.mm_routing_info
    if media is not None and type(media.routing_token_ids) is not list:
        tokens = _listed(media.routing_token_ids)
        media = msgspec.structs.replace(media, routing_token_ids=tokens)
        request = msgspec.structs.replace(request, mm_routing_info=media)
    return msgspec.structs.replace(
        request,
        token_ids=_pack_unless(request.token_ids, pack_tokens),
        block_hashes=_pack_unless(request.block_hashes, pack_u64),
        sequence_hashes=_pack_unless(request.sequence_hashes, pack_u64),
    )


def _listed(tokens: Sequence[int] | bytes) -> list[int] | msgspec.Raw:
    """Return tokens as a list, or its encoded equivalent."""
    if not isinstance(tokens, bytes):
        return [int(one) for one in tokens]
    return unpack_tokens(tokens) if msgpack_tokens is None else msgspec.Raw(msgpack_tokens(tokens))


def _pack_unless(
    values: list[int] | bytes | None, pack: Callable[[list[int]], bytes]
) -> bytes | None:
    return values if values is None or isinstance(values, bytes) else pack(values)
