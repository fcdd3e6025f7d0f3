"""The role of each rank of a partition: whole requests, prefill, or decode from moved blocks.

A prefill and a decode rank can form a pair if KV blocks may move between them: if a worker requires
its transfer domain, the other must share it. `pricing/pair.py` prices the pairs; a scope without
any role never uses this.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from select_service.core.fleet.eligibility import eligible_slots, wants_everyone
from select_service.errors import NoEligibleWorker, NoWorkerForRole

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from select_service.core.columns import Floats, Rows, Slots
    from select_service.core.fleet.catalog import Worker
    from select_service.types import Role, RouterConfig, SelectRequest

_CODES: Final[dict[str, int]] = {"aggregated": 1, "prefill": 2, "decode": 3}
_PREFERRED_WEIGHT: Final = 1.0
"""Weight of a preferred transfer domain if its worker names none."""

_NO_SLOTS: Final[Slots] = np.empty(0, dtype=np.int64)


class Legs(NamedTuple):
    """The eligible ranks of a request by role."""

    whole: Slots
    prefill: Slots
    decode: Slots

    @property
    def rows(self) -> Slots:
        """All of them, one kind after another."""
        return np.concatenate([self.whole, self.prefill, self.decode])

    @property
    def can_pair(self) -> bool:
        """Whether both legs have candidates; transfer domains are checked elsewhere."""
        return bool(len(self.prefill) and len(self.decode))


class Transfer(NamedTuple):
    """The transfer options of prefill ranks with the same policy, as columns by slot."""

    allowed: NDArray[np.bool_] | None  # decode ranks that may take their blocks; None: all
    factors: Floats | None  # factors on the decode leg's cost; None: 1
    costs: Floats | float  # of moving one block there, in blocks of prefill


class Roles:
    """The roles of all selectable ranks at one time; never updated: records refer to them later.

    When workers come, go or change, `after` creates new ones.
    """

    def __init__(self, costs: TransferCosts | None = None) -> None:
        self._costs = costs or TransferCosts()
        self.given = False
        """Whether any worker has a role; without one, roles have no effect."""
        self._given: frozenset[int] = frozenset()  # worker ids with a role
        self._codes = np.zeros(0, dtype=np.int8)  # by slot
        self._workers: tuple[Worker, ...] = ()
        self._transfers: list[Transfer] | None = None  # None: computed on demand
        self._group = _NO_SLOTS  # by slot, of prefill ranks

    def after(
        self,
        workers: Collection[Worker],
        slots: int,
        changed: int,
        left: Sequence[int],
        come: Worker | None,
    ) -> Roles:
        """Return the roles after one worker has come, gone or changed. Copies a few KB.

        `left` are its selectable slots before; `come` is the worker, if it is selectable
        now.
        """
        fresh = Roles(self._costs)
        fresh._workers = tuple(workers)
        fresh._codes = codes = np.zeros(slots, dtype=np.int8)
        codes[: len(self._codes)] = self._codes
        codes[left] = 0
        given = self._given - {changed} if changed in self._given else self._given
        if come is not None and come.slots:
            codes[list(come.slots.values())] = _CODES[role_of(come)]
            if come.spec.role is not None:
                given |= {changed}
        fresh._given, fresh.given = given, bool(given)
        return fresh

    def only(self, slots: Slots, role: Role) -> Slots:
        """Return the slots that have this role."""
        chosen: Slots = slots[self._codes[slots] == _CODES[role]]
        return chosen

    def rather_whole(self, rows: Rows) -> Rows:
        """Return the ranks for whole requests if there are any, else all."""
        slots = np.arange(rows.stop) if isinstance(rows, slice) else rows
        whole = self.only(slots, "aggregated")
        return whole if len(whole) else rows

    def _eligible(self, request: SelectRequest, workers: Mapping[int, Worker]) -> Slots:
        """Return all slots that meet the request's constraints, ascending."""
        if wants_everyone(request):
            return np.flatnonzero(self._codes)  # a hundred times as fast as iterating
        return np.array(eligible_slots(request, workers), dtype=np.int64)

    def legs(self, request: SelectRequest, workers: Mapping[int, Worker]) -> Legs:
        """Return the candidates of a request by role; a pinned rank leaves the other leg free."""
        slots = self._eligible(request, workers)
        whole, prefill, decode = (
            self.only(slots, role) for role in ("aggregated", "prefill", "decode")
        )
        if request.pinned_worker is not None:
            free = msgspec.structs.replace(request, pinned_worker=None)
            others = _NO_SLOTS if len(whole) else self._eligible(free, workers)
            if len(prefill):
                decode = self.only(others, "decode")
            elif len(decode):
                prefill = self.only(others, "prefill")
        return Legs(whole, prefill, decode)

    def whole_rows(
        self, request: SelectRequest, workers: Mapping[int, Worker], *, if_cached: bool
    ) -> Slots:
        """Return the ranks that may take a whole request.

        `if_cached`: ranks that hold too little of the prompt are excluded later, so decode
        ranks are included.

        Raises:
            NoEligibleWorker: no rank meets the constraints.
            NoWorkerForRole: those that do are for prefill or decode only.
        """
        slots = self._eligible(request, workers)
        if not len(slots):
            raise NoEligibleWorker
        codes = self._codes[slots]
        wanted = codes == _CODES["aggregated"]
        if if_cached:
            wanted |= codes == _CODES["decode"]
        rows: Slots = slots[wanted]
        if not len(rows):
            raise NoWorkerForRole("aggregated")
        return rows

    def pair_rows(
        self,
        request: SelectRequest,
        workers: Mapping[int, Worker],
        open_rows: Callable[[Slots], Slots],
    ) -> Slots:
        """Return the ranks whose load decides when a pair request may go: the prefill candidates.

        If no pair is possible now, the ranks for whole requests; without any, the decode ranks,
        because there is no room elsewhere or because of what they hold of the prompt.

        `open_rows` leaves out ranks that a gate considers busy or full.

        Raises:
            NoEligibleWorker: no rank meets the constraints.
            NoWorkerForRole: those that do are for prefill only.
        """
        legs = self.legs(request, workers)
        if legs.can_pair and self.may_move(legs) and len(open_rows(legs.decode)):
            rows: Slots = np.sort(np.concatenate([legs.whole, legs.prefill]))
            return rows
        if len(legs.whole):
            return legs.whole
        if not len(legs.decode):
            raise NoWorkerForRole("decode") if len(legs.prefill) else NoEligibleWorker
        return legs.decode

    def may_move(self, legs: Legs) -> bool:
        """Tell whether blocks may move between any two of these."""
        return any(
            transfer.allowed is None or transfer.allowed[legs.decode].any()
            for _, transfer in self.transfers(legs.prefill)
        )

    def transfers(self, prefill: Slots) -> list[tuple[Slots, Transfer]]:
        """Return the prefill ranks by transfer policy: positions in `prefill`, and the policy."""
        transfers = self._transfers
        if transfers is None:
            transfers = self._transfers = self._grouped()
        if len(transfers) == 1:
            return [(np.arange(len(prefill)), transfers[0])]
        groups = self._group[prefill]
        return [
            ((groups == group).nonzero()[0], transfers[group])
            for group in np.unique(groups).tolist()
        ]

    def _grouped(self) -> list[Transfer]:
        attached = [worker for worker in self._workers if worker.slots]
        prefill = [worker for worker in attached if worker.spec.role == "prefill"]
        decode = [worker for worker in attached if worker.spec.role == "decode"]
        self._group = np.zeros(len(self._codes), dtype=np.int64)
        numbers: dict[object, int] = {}
        transfers: list[Transfer] = []
        for worker in prefill:
            key = _policy_of(worker)
            if key not in numbers:
                numbers[key] = len(transfers)
                transfers.append(self._transfer(worker, decode))
            for slot in worker.slots.values():
                self._group[slot] = numbers[key]
        return transfers or [Transfer(None, None, self._costs.anywhere)]

    def _transfer(self, source: Worker, targets: Iterable[Worker]) -> Transfer:
        allowed = np.ones(len(self._codes), dtype=np.bool_)
        factors = np.ones(len(self._codes))
        costs = np.full(len(self._codes), self._costs.anywhere)
        spec = source.spec
        bias = 1.0
        if spec.kv_transfer_enforcement == "preferred":
            weight = spec.kv_transfer_preferred_weight
            bias = math.exp(-math.tanh(_PREFERRED_WEIGHT if weight is None else weight))
        for target in targets:
            may = _accepts(source, target) and _accepts(target, source)
            is_near = shares_domain(source, target, spec.kv_transfer_domain)
            factor = bias if bias != 1.0 and is_near else 1.0
            cost = self._costs.between(source, target)
            for slot in target.slots.values():
                allowed[slot], factors[slot], costs[slot] = may, factor, cost
        return Transfer(
            None if allowed.all() else allowed,
            None if (factors == 1.0).all() else factors,
            costs if self._costs.by_domain else self._costs.anywhere,
        )

    def check(self) -> None:
        """Assert all invariants of the roles."""
        codes = np.zeros(len(self._codes), dtype=np.int8)
        for worker in self._workers:
            for slot in worker.slots.values():
                codes[slot] = _CODES[role_of(worker)]
        assert (codes == self._codes).all(), "a code for each open slot"
        named = {one.worker_id for one in self._workers if one.slots and one.spec.role}
        assert named == self._given
        assert self.given == bool(named)


def role_of(worker: Worker) -> Role:
    """Return a worker's role; unspecified means whole requests."""
    return worker.spec.role or "aggregated"


def _policy_of(worker: Worker) -> object:
    """Return a key: workers with equal keys may exchange blocks with the same others."""
    spec = worker.spec
    return (
        spec.kv_transfer_domain,
        spec.kv_transfer_enforcement,
        spec.kv_transfer_preferred_weight,
        frozenset(spec.topology_domains.items()),
    )


def _accepts(worker: Worker, other: Worker) -> bool:
    """Whether a worker's own transfer requirement is met."""
    spec = worker.spec
    demands = spec.kv_transfer_enforcement == "required" and spec.kv_transfer_domain is not None
    return not demands or shares_domain(worker, other, spec.kv_transfer_domain)


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
