"""What each rank of a partition is for: whole requests, prompts, or generation from moved blocks.

A prefill and a decode rank make a pair when KV blocks may move between them: a worker that demands
its transfer domain shares it with the other, or there is no pair. `pairing.py` prices what is
found here; a scope in which nobody was given a role never asks.
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
    from select_service.types import Role, SelectRequest

_CODES: Final[dict[str, int]] = {"aggregated": 1, "prefill": 2, "decode": 3}
_PREFERRED_WEIGHT: Final = 1.0
"""Of a preferred transfer domain whose worker names no weight."""

_NO_SLOTS: Final[Slots] = np.empty(0, dtype=np.int64)


class Legs(NamedTuple):
    """The eligible ranks of a request by what they are for."""

    whole: Slots
    prefill: Slots
    decode: Slots

    @property
    def rows(self) -> Slots:
        """All of them, one kind after another."""
        return np.concatenate([self.whole, self.prefill, self.decode])

    @property
    def can_pair(self) -> bool:
        """Whether there is somebody for either leg; transfer domains are another matter."""
        return bool(len(self.prefill) and len(self.decode))


class Transfer(NamedTuple):
    """What prefill ranks with the same transfer policy may do, as columns by slot."""

    allowed: NDArray[np.bool_] | None  # decode ranks that may take their blocks; None: all
    factors: Floats | None  # what that makes of the decode leg's cost; None: 1


class Roles:
    """The roles of all ranks that may be chosen, at one time: records are explained by them later.

    When workers come, go or change there are others, made of these by `after`.
    """

    def __init__(self) -> None:
        self.given = False
        """Whether anybody was given a role; without, all is as if there were none."""
        self._given: frozenset[int] = frozenset()  # worker ids with a role
        self._codes = np.zeros(0, dtype=np.int8)  # by slot
        self._workers: tuple[Worker, ...] = ()
        self._transfers: list[Transfer] | None = None  # None: to be found when somebody asks
        self._group = _NO_SLOTS  # by slot, of prefill ranks

    def after(
        self,
        workers: Collection[Worker],
        slots: int,
        changed: int,
        left: Sequence[int],
        come: Worker | None,
    ) -> Roles:
        """Return what they are when one worker has come, gone or changed. A copy of a few KB.

        Args:
            workers: all who may be chosen now.
            slots: how many there are.
            changed: whose id it is.
            left: the slots on which it could be chosen before.
            come: it, if it may be chosen now.
        """
        fresh = Roles()
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
        """Return those of the slots that have this role."""
        chosen: Slots = slots[self._codes[slots] == _CODES[role]]
        return chosen

    def rather_whole(self, rows: Rows) -> Rows:
        """Return those who take whole requests, if there are any, else all."""
        slots = np.arange(rows.stop) if isinstance(rows, slice) else rows
        whole = self.only(slots, "aggregated")
        return whole if len(whole) else rows

    def _eligible(self, request: SelectRequest, workers: Mapping[int, Worker]) -> Slots:
        """Return the slots of all who meet its wishes, ascending."""
        if wants_everyone(request):
            return np.flatnonzero(self._codes)  # a hundredth of what going through them takes
        return np.array(eligible_slots(request, workers), dtype=np.int64)

    def legs(self, request: SelectRequest, workers: Mapping[int, Worker]) -> Legs:
        """Return who may serve a request; a pinned rank leaves the other leg free."""
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
        """Return who may take a whole request.

        Args:
            request: its wishes.
            workers: by id.
            if_cached: whoever holds too little of the prompt will be left out later, so that
                decode ranks may be asked, too.

        Raises:
            NoEligibleWorker: nobody meets the wishes.
            NoWorkerForRole: those it may go to only prefill or only decode.
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
        """Return whose load decides when a request may go that takes a pair: who would prefill.

        Where there can be no pair now, it is who could do the whole; where nobody can, who could
        decode, for want of room or for what they hold of the prompt.

        Args:
            request: its wishes.
            workers: by id.
            open_rows: leaves out who is busy or full by what a gate knows.

        Raises:
            NoEligibleWorker: nobody meets the wishes.
            NoWorkerForRole: those who do only prefill.
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
        seated = [worker for worker in self._workers if worker.slots]
        prefill = [worker for worker in seated if worker.spec.role == "prefill"]
        decode = [worker for worker in seated if worker.spec.role == "decode"]
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
        return transfers or [Transfer(None, None)]

    def _transfer(self, source: Worker, targets: Iterable[Worker]) -> Transfer:
        allowed = np.ones(len(self._codes), dtype=np.bool_)
        factors = np.ones(len(self._codes))
        spec = source.spec
        bias = 1.0
        if spec.kv_transfer_enforcement == "preferred":
            weight = spec.kv_transfer_preferred_weight
            bias = math.exp(-math.tanh(_PREFERRED_WEIGHT if weight is None else weight))
        for target in targets:
            may = _accepts(source, target) and _accepts(target, source)
            factor = bias if bias != 1.0 and _shares(source, target) else 1.0
            for slot in target.slots.values():
                allowed[slot], factors[slot] = may, factor
        return Transfer(
            None if allowed.all() else allowed, None if (factors == 1.0).all() else factors
        )

    def check(self) -> None:
        """State every promise of the roles."""
        codes = np.zeros(len(self._codes), dtype=np.int8)
        for worker in self._workers:
            for slot in worker.slots.values():
                codes[slot] = _CODES[role_of(worker)]
        assert (codes == self._codes).all(), "a code for each open slot"
        named = {one.worker_id for one in self._workers if one.slots and one.spec.role}
        assert named == self._given
        assert self.given == bool(named)


def role_of(worker: Worker) -> Role:
    """Return what a worker is for; nobody said anything: whole requests."""
    return worker.spec.role or "aggregated"


def _policy_of(worker: Worker) -> object:
    """Workers with equal ones may exchange blocks with the same others."""
    spec = worker.spec
    return (
        spec.kv_transfer_domain,
        spec.kv_transfer_enforcement,
        spec.kv_transfer_preferred_weight,
        frozenset(spec.topology_domains.items()),
    )


def _accepts(worker: Worker, other: Worker) -> bool:
    """Whether a worker's own demand is met."""
    spec = worker.spec
    demands = spec.kv_transfer_enforcement == "required" and spec.kv_transfer_domain is not None
    return not demands or _shares(worker, other)


def _shares(worker: Worker, other: Worker) -> bool:
    """Whether the other is in the same place, in the domain the worker names; unknown is not."""
    domain = worker.spec.kv_transfer_domain
    if domain is None:
        return False
    place = worker.spec.topology_domains.get(domain)
    return place is not None and place == other.spec.topology_domains.get(domain)
