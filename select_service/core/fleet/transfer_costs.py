"""What moving a KV block between two workers costs, by the topology domains that they share.

The legs of a pair (`roles.py`) and ranks that pull blocks (`pricing/kv_sources.py`) ask here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.core.fleet.catalog import Worker
    from select_service.types import RouterConfig


class TransferCosts(NamedTuple):
    """Costs of one block, in blocks of prefill."""

    anywhere: float = 0.1
    by_domain: Mapping[str, float] = {}  # between workers in the same place of it
    are_learnt: bool = False  # of pulls, where they were measured

    def between(self, worker: Worker, other: Worker) -> float:
        """Return the cost between two workers: the least of the domains that they share.

        At most the one between any two, as blocks may take that way, too.
        """
        shared = [
            cost for domain, cost in self.by_domain.items() if shares_domain(worker, other, domain)
        ]
        return min([self.anywhere, *shared])


def transfer_costs(config: RouterConfig) -> TransferCosts:
    """Return the costs of the settings."""
    return TransferCosts(
        config.kv_transfer_cost_per_block,
        config.kv_transfer_cost_by_domain,
        are_learnt=config.kv_pull_costs == "learnt",
    )


def shares_domain(worker: Worker, other: Worker, domain: str | None) -> bool:
    """Whether both are in the same place of a topology domain; unknown is not."""
    if domain is None:
        return False
    place = worker.spec.topology_domains.get(domain)
    return place is not None and place == other.spec.topology_domains.get(domain)
