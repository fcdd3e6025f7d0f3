"""Reads a request against the current state: its partition, its normalised prompt, its weights.

Every verb starts here, so this fixes the order in which a request's faults are reported. Nothing is
decided, and only counters change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from select_service.core.fleet.eligibility import check_wishes
from select_service.core.ledger.unserved_demand import UnservedDemand
from select_service.core.pricing.prompt import read_prompt
from select_service.core.pricing.weights import weights_in_force
from select_service.errors import NoSchedulableWorker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from indexer.types import Scope
    from select_service.core.fleet.pins import Pins
    from select_service.core.partition import Partition
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.pricing.weights import Weights
    from select_service.types import (
        CoreLimits,
        PromptFields,
        RouterConfig,
        RouterConfigOverride,
        SelectRequest,
    )

_OVERRIDES_MAX: Final = 256
"""Distinct overrides whose weights are cached; at the limit the cache starts anew."""


class RequestReader:
    """Reads requests against the current workers and configuration."""

    def __init__(
        self,
        config: RouterConfig,
        partitions: Mapping[Scope, Partition],
        pins: Pins,
        limits: CoreLimits,
    ) -> None:
        self._limits = limits
        self.config = config
        self.schedulable = 0
        """Schedulable workers in the whole process."""
        self.strayed = 0
        """Requests for a scope without workers while other scopes had some."""
        self.strayed_to: Scope | None = None
        """The scope of the last of them."""
        self.unserved = UnservedDemand(limits)
        """Requests for scopes without a worker."""
        self._partitions, self._pins = partitions, pins
        self._overridden: dict[tuple[float | bool | None, ...], Weights] = {}
        self.weights = weights_in_force(config, None)
        """The weights of requests without an override."""

    def selection(self, request: SelectRequest) -> tuple[Partition, Prompt, Weights]:
        """Read a selection request.

        Raises:
            ServiceError: of the scope, the prompt, or what it wishes for.
        """
        tenant = request.tenant_id  # as `request.scope`, at a fraction of the cost
        if tenant is UNSET:
            tenant = request.routing_group
        key = request.model_name, "default" if tenant is UNSET else tenant
        partition: Partition | None
        partition = self._partitions.get(key)  # type: ignore[call-overload] # equal to its scope
        if partition is None or not partition.seating.workers:
            try:
                partition = self.usable(request)
            except NoSchedulableWorker:
                scope = request.scope
                is_known = scope in self._partitions or self._pins.get(scope) is not None
                self.unserved.note(scope, is_known=is_known)
                raise
        index, override = partition.index, request.router_config_override
        prompt = read_prompt(
            request,
            block_size=index.block_size,
            is_eagle=index.is_eagle,
            blocks_max=self._limits.blocks_per_request_max,
        )
        weights = self.weights if override is None else self.overridden(override)
        if request.pinned_worker is not None:
            check_wishes(request)
        if request.is_pair:  # its legs are compared in the contract's blocks
            weights = weights.kv_cost()
        return partition, prompt, weights

    def prompt(self, request: PromptFields) -> tuple[Partition, Prompt, Weights]:
        """Read a request with a prompt, of any kind.

        Raises:
            ServiceError: of the scope or the prompt.
        """
        return self._prompt_in(self.usable(request), request)

    def view(self, request: PromptFields) -> tuple[Partition, Prompt, Weights]:
        """Read a request that looks at all ranks with a prompt, those that drain included.

        Raises:
            ServiceError: of the scope or the prompt.
        """
        return self._prompt_in(self.seated(request), request)

    def _prompt_in(
        self, partition: Partition, request: PromptFields
    ) -> tuple[Partition, Prompt, Weights]:
        index = partition.index
        prompt = read_prompt(
            request,
            block_size=index.block_size,
            is_eagle=index.is_eagle,
            blocks_max=self._limits.blocks_per_request_max,
        )
        override = request.router_config_override
        return partition, prompt, self.weights if override is None else self.weights_for(request)

    def draining(self, request: PromptFields) -> Partition | None:
        """Return the requested partition if all its workers drain: its reservations live on."""
        partition = self._partitions.get(request.scope)
        drains = (
            partition is not None and partition.seating.present and not partition.seating.workers
        )
        return partition if drains else None

    def seated(self, request: PromptFields) -> Partition:
        """Return the requested partition, even if all its workers drain.

        Raises:
            NoSchedulableWorker: it has no worker.
        """
        partition = self._partitions.get(request.scope)
        return (
            partition
            if partition is not None and partition.seating.present
            else self.usable(request)
        )

    def usable(self, request: PromptFields) -> Partition:
        """Return the requested partition.

        Raises:
            NoSchedulableWorker: it has no worker.
        """
        if not self.schedulable:
            raise NoSchedulableWorker.anywhere()
        scope = request.scope
        partition = self._partitions.get(scope)
        if partition is None or not partition.seating.workers:
            if (
                partition is None or not partition.seating.present
            ):  # else it was the operator's wish
                self.strayed += 1
                self.strayed_to = scope
            raise NoSchedulableWorker.in_scope(scope)
        return partition

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
