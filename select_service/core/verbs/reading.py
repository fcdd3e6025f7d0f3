"""From a request to what it is about: its partition, its prompt in one form, the weights in force.

What every verb does first, and the order in which a request's faults are found.
Nothing is decided here, and nothing changed but what is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from select_service.core.books.unserved import Unserved
from select_service.core.fleet.eligibility import check_wishes
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
"""Overrides of which it is remembered what they make of the weights; then that begins anew."""


class Reader:
    """Reads requests against what is there now."""

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
        """Workers, in the whole process."""
        self.strayed = 0
        """Requests for a scope without workers while others had some."""
        self.strayed_to: Scope | None = None
        """Where the last of them went."""
        self.unserved = Unserved()
        """Requests for a worker of scopes that have none any more."""
        self._partitions, self._pins = partitions, pins
        self._overridden: dict[tuple[float | bool | None, ...], Weights] = {}
        self.weights = weights_in_force(config, None)
        """In force for who has none of its own."""

    def selection(self, request: SelectRequest) -> tuple[Partition, Prompt, Weights]:
        """Read a prompt that looks for a worker.

        Raises:
            ServiceError: of the scope, the prompt, or what it wishes for.
        """
        try:
            partition, prompt, weights = self.prompt(request)
        except NoSchedulableWorker:
            scope = request.scope
            if scope in self._partitions or self._pins.get(scope) is not None:
                self.unserved.note(scope)
            raise
        if request.pinned_worker is not None:
            check_wishes(request)
        if request.is_pair:  # its legs are compared in the contract's blocks
            weights = weights.kv_cost()
        return partition, prompt, weights

    def prompt(self, request: PromptFields) -> tuple[Partition, Prompt, Weights]:
        """Read any prompt.

        Raises:
            ServiceError: of the scope or the prompt.
        """
        partition = self.usable(request)
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
        """Return the partition asked for if all its workers drain: what was booked lives on."""
        partition = self._partitions.get(request.scope)
        drains = (
            partition is not None and partition.seating.present and not partition.seating.workers
        )
        return partition if drains else None

    def seated(self, request: PromptFields) -> Partition:
        """Return the partition asked for, also where all workers drain.

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
        """Return the partition asked for.

        Raises:
            NoSchedulableWorker: it has no worker.
        """
        if not self.schedulable:
            raise NoSchedulableWorker.anywhere()
        tenant = request.tenant_id
        if tenant is UNSET:
            tenant = request.routing_group
        key = request.model_name, "default" if tenant is UNSET else tenant
        partition: Partition | None
        partition = self._partitions.get(key)  # type: ignore[call-overload] # equal to its scope
        if partition is None or not partition.seating.workers:
            scope = request.scope
            if (
                partition is None or not partition.seating.present
            ):  # else it was the operator's wish
                self.strayed += 1
                self.strayed_to = scope
            raise NoSchedulableWorker.in_scope(scope)
        return partition

    def weights_for(self, request: PromptFields) -> Weights:
        """Return the weights of a request: its own, on top of the process's."""
        override = request.router_config_override
        return self.weights if override is None else self.overridden(override)

    def overridden(self, override: RouterConfigOverride) -> Weights:
        """Return the weights in force for who overrides them so; a fleet does so in few ways."""
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
