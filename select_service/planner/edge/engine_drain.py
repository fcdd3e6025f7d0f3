"""Graceful scale-down: engines are named, drained, waited for and marked before they go.

Stands between a decision and the connector. For a pool that needs fewer replicas, it asks the
selectors which workers are cheapest to lose (or Kubernetes, where that cannot be chosen), has every
selector drain them, and lets the count fall by as many as are idle or have used up
`--drain-timeout`. Workers that are needed again serve again at once. A restarted planner takes over
the drains that carry its own reason. `core/scale_down.py` decides; this file talks.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.planner.core.scale_down import Leaving
from select_service.planner.edge.connectors.pods import Homes
from select_service.planner.errors import ConnectorError, SelectorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from select_service.planner.edge.connectors.pods import Pods
    from select_service.planner.edge.selectors import MergedWorker, SelectorFleet
    from select_service.planner.types import PoolKey, PoolState, Target

REASON: Final = "select-planner"
"""Start of the reason of all our drains, by which a restarted planner recognises them."""
NAME_MAX: Final = 200
"""Characters of a pool's name in a reason; selectors accept 256 in all."""
TURN_S: Final = 10.0
"""Time limit of a turn, for all pools together: a third of the shortest lease."""
_log = logging.getLogger("select_planner")


class Kept(NamedTuple):
    """What one pool keeps until its leaving workers are idle."""

    replicas: int
    """The lowest count that may be asked for now."""
    why: str
    """What is in flight on which worker, as text."""


class EngineDrain:
    """Drains the workers of several pools before they go.

    Args:
        selectors: the selectors of the fleet.
        pods: the pods of each pool, where Kubernetes runs them.
        clock: monotonic seconds.
        most_s: the longest wait for a worker, from when it was named.
    """

    def __init__(
        self,
        selectors: SelectorFleet,
        pods: Mapping[PoolKey, Pods],
        clock: Callable[[], float],
        most_s: float,
    ) -> None:
        self._selectors = selectors
        self._pods = pods
        self._clock = clock
        self._most_s = most_s
        self.pools: dict[PoolKey, Leaving] = {}
        """By pool, of those that were looked at since this planner became the leader."""
        self.ends = dict.fromkeys(("idle", "late", "stayed"), 0)
        """What became of named workers, for /metrics."""
        self.failures = 0
        """Turns in which a selector or the API server could not be asked, for /metrics."""
        self._logged: dict[PoolKey, str] = {}  # the last failure logged

    async def settle(
        self, targets: Iterable[Target], states: Mapping[PoolKey, PoolState]
    ) -> dict[PoolKey, Kept]:
        """Bring drains in line with what is wanted, in all pools at once.

        Returns:
            the pools that have to keep some of their replicas for now.
        """
        known = [one for one in targets if one.pool in states]
        kept = await asyncio.gather(*(self._kept(one, states[one.pool]) for one in known))
        return {one.pool: some for one, some in zip(known, kept, strict=True) if some is not None}

    def forget(self) -> None:
        """Drop all state: another planner leads, and its drains are found when we lead again."""
        self.pools.clear()

    async def close(self) -> None:
        """Close the connections. Drains stay, for the next planner."""
        await self._selectors.close()

    async def _kept(self, target: Target, state: PoolState) -> Kept | None:
        """Settle one pool. A selector that cannot be asked holds a scale-down for `most_s` only.

        Replicas that have not started are the first to go, and have nothing to finish.
        """
        pool, desired = target.pool, state.desired
        fewer = max(0, desired - target.replicas)
        idle = min(fewer, state.starting)
        surplus = fewer - idle
        leaving = self.pools.setdefault(pool, Leaving())
        now = self._clock()
        for end, count in leaving.want(desired, surplus, now).items():
            self.ends[end] += count
        try:
            async with asyncio.timeout(TURN_S):
                why = await self._settle(pool, leaving, surplus, now)
            self._logged.pop(pool, None)
        except (SelectorError, ConnectorError, TimeoutError) as error:
            self.failures += 1
            failure = str(error) or f"no answer within {TURN_S:g} s"
            if self._logged.get(pool) != failure:  # once, not at every look
                _log.warning("%s: %s", pool, failure)
            self._logged[pool] = failure
            nobody_knows = dict.fromkeys(leaving.named, "it is not known what is in flight")
            why = leaving.let_go(nobody_knows, surplus, now, self._most_s)
            why = f"{failure}; {why}" if why else ""
        if not why:
            return None
        return Kept(desired - idle - len(leaving.ready) - leaving.blind, why)

    async def _settle(self, pool: PoolKey, leaving: Leaving, surplus: int, now: float) -> str:
        """Return what the lower count waits for. Every step can be interrupted and repeated."""
        if leaving.is_over and not surplus:
            return ""
        workers = await self._selectors.workers(pool.model, leaving.known)
        pods = self._pods.get(pool)
        if pods is not None:
            workers = _by_pod(workers)
        drained = [id_ for id_, one in workers.items() if _is_ours(one, pool)]
        leaving.adopt(drained, surplus, now)
        leaving.see(workers.keys(), now)
        if len(leaving.named) < surplus:
            candidates = await self._candidates(pool, workers, surplus + len(leaving.going))
            new = leaving.name(candidates, surplus, now, are_there=pods is not None)
            for one in new:
                _log.info("%s: worker %s is to go", pool, one)
        await self._let_stay(pool, leaving, workers)
        leavers = [workers[one] for one in (*leaving.named, *leaving.going)]
        # new, or undone: by hand, or by a selector that started again without its state
        undone = [one for one in leavers if None in one.drains and _may_drain(one, pool)]
        reason = _begins(pool) + "needs fewer"
        await asyncio.gather(
            *(self._selectors.drain(id_, reason) for one in undone for id_ in _ids(one))
        )
        answers = await asyncio.gather(*(self._in_flight(workers[one]) for one in leaving.named))
        in_flight = dict(zip(leaving.named, answers, strict=True))
        in_order = pods is not None and pods.go_by_ordinal
        why = leaving.let_go(in_flight, surplus, now, self._most_s, in_order=in_order)
        if leaving.ready:
            await self._mark(pool, leaving, workers)
        return why

    async def _candidates(
        self, pool: PoolKey, workers: Mapping[int, MergedWorker], count: int
    ) -> list[int]:
        """Return the workers to remove, in order; with pods, only workers that have one.

        Raises:
            ConnectorError: no worker has the address or the name of a pod.
        """
        pods = self._pods.get(pool)
        ours = {id_: one for id_, one in workers.items() if one.role == pool.role}
        if pods is None:
            candidates = await self._selectors.candidates(pool, count)
            return [one for one in candidates if one in ours]
        there = await pods.there()
        homes = Homes(there)
        if pods.go_by_ordinal:
            by_name = {homes.of(one.host): one for one in workers.values()}
            going = [pod.metadata.name for pod in pods.by_ordinal(there)[:count]]
            found = [by_name[name] for name in going if name in by_name]
        else:
            housed = {id_: one for id_, one in ours.items() if homes.of(one.host)}
            most = count * max((len(_ids(one)) for one in ours.values()), default=1)
            candidates = await self._selectors.candidates(pool, most + len(ours) - len(housed))
            at = {id_: one for one in housed.values() for id_ in _ids(one)}
            found = list(dict.fromkeys(at[one] for one in candidates if one in at))
        if there and not any(homes.of(one.host) for one in workers.values()):
            raise ConnectorError(
                "none of its workers has the address or the name of one of its pods"
            )
        return [one.worker_id for one in found]

    async def _in_flight(self, worker: MergedWorker) -> str:
        answers = await asyncio.gather(*(self._selectors.in_flight(id_) for id_ in _ids(worker)))
        return next((work for work in answers if work), "")

    async def _let_stay(
        self, pool: PoolKey, leaving: Leaving, workers: Mapping[int, MergedWorker]
    ) -> None:
        """Undo the drains and marks of the workers that stay."""
        if leaving.staying:
            await self._mark(pool, leaving, workers)
        for one in list(leaving.staying):
            if _may_drain(workers[one], pool):
                for id_ in _ids(workers[one]):
                    await self._selectors.undrain(id_)
            leaving.stayed(one)
            self.ends["stayed"] += 1
            _log.info("%s: worker %s stays", pool, one)

    async def _mark(
        self, pool: PoolKey, leaving: Leaving, workers: Mapping[int, MergedWorker]
    ) -> None:
        """Mark the pods of the workers that go now, and unmark all others."""
        pods = self._pods.get(pool)
        if pods is None or pods.go_by_ordinal:
            return
        there = await pods.there()
        homes = Homes(there)
        going = {homes.of(workers[one].host) for one in (*leaving.ready, *leaving.going)}
        for pod in there:
            await pods.mark(pod, goes_first=pod.metadata.name in going)


def _begins(pool: PoolKey) -> str:
    """Return the start of the reason of our drains of a pool; long names are cut at the front."""
    return f"{REASON}: {str(pool)[-NAME_MAX:]} "


def _by_pod(workers: Mapping[int, MergedWorker]) -> dict[int, MergedWorker]:
    """Return one worker for each pod, with the others `beside` it: they can only go together."""
    found: dict[tuple[str, str], MergedWorker] = {}
    for id_, one in sorted(workers.items()):
        key = one.host or str(id_), one.role  # prefill and decode on one machine are two
        first = found.setdefault(key, one)
        if first is not one:
            drains, beside = first.drains | one.drains, (*first.beside, id_)
            found[key] = first._replace(drains=drains, beside=beside)
    return {one.worker_id: one for one in found.values()}


def _ids(worker: MergedWorker) -> tuple[int, ...]:
    return worker.worker_id, *worker.beside


def _is_ours(worker: MergedWorker, pool: PoolKey) -> bool:
    """Whether a worker drains, and only by planners of this pool."""
    return worker.drains != {None} and _may_drain(worker, pool)


def _may_drain(worker: MergedWorker, pool: PoolKey) -> bool:
    """Whether its drain is ours to begin or end: no other drains it at any selector."""
    return all(why is None or why.startswith(_begins(pool)) for why in worker.drains)
