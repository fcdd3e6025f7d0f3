"""Engines go when nothing is in flight on them: they are named, drained, waited for and marked.

It stands between a decision and the connector. For a pool that shall have fewer replicas it asks
the selectors who is cheapest to lose (or Kubernetes, where nobody can choose), tells every selector
to give those no more work, and holds the lower count back until they are idle, or for
`--drain-timeout`. Who may stay after all, because more is needed again, works on at once. A planner
that starts again takes over the drains it finds with its own reason.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from select_service.planner.core.leaving import Leaver, Leaving
from select_service.planner.errors import ConnectorError, SelectorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from select_service.planner.edge.connectors.pods import Pods
    from select_service.planner.edge.selectors import Selectors, Worker
    from select_service.planner.types import PoolKey, PoolState, Target

__all__ = ["REASON", "Retiring"]

REASON: Final = "select-planner"
"""Begins the reason of every drain of ours: by it they are known again."""
TURN_S: Final = 10.0
"""One pool's turn is over within that time: a third of the shortest lease."""
_log = logging.getLogger("select_planner")


class Retiring:
    """Lets engines of several pools go.

    Args:
        selectors: who knows the workers.
        pods: of each pool, where Kubernetes has them.
        clock: monotonic seconds.
        most_s: a lower count waits no longer.
    """

    def __init__(
        self,
        selectors: Selectors,
        pods: Mapping[PoolKey, Pods],
        clock: Callable[[], float],
        most_s: float,
    ) -> None:
        self._selectors = selectors
        self._pods = pods
        self._clock = clock
        self._most_s = most_s
        self.pools: dict[PoolKey, Leaving] = {}
        """Of pools that were looked at since this planner began to act."""
        self.ends = dict.fromkeys(("idle", "late", "stayed"), 0)
        """What became of those that were named, for /metrics; so is the next."""
        self.failures = 0

    async def settle(
        self, targets: Iterable[Target], states: Mapping[PoolKey, PoolState]
    ) -> dict[PoolKey, str]:
        """Bring drains in line with what is wanted.

        Returns:
            the pools whose lower count has to wait, and in words for what.
        """
        waiting: dict[PoolKey, str] = {}
        for target in targets:
            pool, state = target.pool, states.get(target.pool)
            if state is None:
                continue
            surplus = max(0, state.desired - target.replicas)
            leaving = self.pools.setdefault(pool, Leaving())
            try:
                async with asyncio.timeout(TURN_S):
                    why = await self._settle(pool, leaving, surplus)
            except (SelectorError, ConnectorError, TimeoutError) as error:
                why = self._failed(pool, leaving, error)
            if surplus and why:
                waiting[pool] = why
        return waiting

    def lowered(self, pool: PoolKey) -> None:
        """The count of a pool was lowered."""
        leaving = self.pools.get(pool)
        if leaving is not None:
            now = self._clock()
            is_late = leaving.waited_s(now) >= self._most_s
            self.ends["late" if is_late else "idle"] += len(leaving.named)
            leaving.lower(now)

    def forget(self) -> None:
        """Another planner acts: what it drains is found when we do again."""
        self.pools.clear()

    async def close(self) -> None:
        """Let go of the connections; drains stay, for whoever plans next."""
        await self._selectors.close()

    def _failed(self, pool: PoolKey, leaving: Leaving, error: Exception) -> str:
        """Count it; nobody who cannot be asked keeps engines for ever."""
        self.failures += 1
        why = str(error) or f"no answer within {TURN_S:g} s"
        _log.warning("%s: %s", pool, why)
        return "" if leaving.waited_s(self._clock()) >= self._most_s else why

    async def _settle(self, pool: PoolKey, leaving: Leaving, surplus: int) -> str:
        """Do one pool; every step may be broken off, and is done again the next time."""
        now = self._clock()
        leaving.want(surplus, now)
        if leaving.is_over and not surplus:
            return ""
        workers = await self._selectors.workers(pool.model)
        if leaving.is_new:
            drained = [one for one in workers.values() if _is_ours(one, pool)]
            leaving.take_over([_leaver(one, pool) for one in drained], surplus, now)
        leaving.see(workers.keys(), now)
        if len(leaving.named) < surplus:
            candidates = await self._candidates(pool, workers, surplus + leaving.going)
            for one in leaving.name(candidates, surplus):
                _log.info("%s: worker %s is to go", pool, one.worker_id)
        for one in list(leaving.staying):
            await self._let_stay(pool, one)
            leaving.stayed(one)
        in_flight: dict[int, str] = {}
        for one in leaving.named:
            if one.ours and None in workers[one.worker_id].drains:
                # new, or undone: by hand, or by a selector that started again without its state
                await self._selectors.drain(one.worker_id, f"{REASON}: {pool} needs fewer")
            in_flight[one.worker_id] = await self._selectors.in_flight(one.worker_id)
        why = leaving.waits_for(in_flight, surplus, now, self._most_s)
        if leaving.named and not why:
            await self._mark(pool, {one.host for one in leaving.named}, goes_first=True)
        return why

    async def _candidates(
        self, pool: PoolKey, workers: Mapping[int, Worker], count: int
    ) -> Sequence[Leaver]:
        """Return who goes, first those who go first."""
        pods = self._pods.get(pool)
        if pods is None or not pods.go_by_ordinal:
            told = await self._selectors.candidates(pool, count)
            found = [workers[one.worker_id] for one in told if one.worker_id in workers]
        else:
            by_host = {one.host: one for one in workers.values() if one.host}
            going = pods.by_ordinal(await pods.all())[:count]
            found = [by_host[ip] for pod in going for ip in pod.addresses if ip in by_host]
        return [_leaver(one, pool) for one in found]

    async def _let_stay(self, pool: PoolKey, leaver: Leaver) -> None:
        """Undo what was done to somebody."""
        await self._mark(pool, {leaver.host}, goes_first=False)
        if leaver.ours:
            await self._selectors.undrain(leaver.worker_id)
        self.ends["stayed"] += 1
        _log.info("%s: worker %s stays", pool, leaver.worker_id)

    async def _mark(self, pool: PoolKey, hosts: set[str], *, goes_first: bool) -> None:
        pods = self._pods.get(pool)
        if pods is None or pods.go_by_ordinal:
            return
        for pod in await pods.all():
            if hosts & pod.addresses:
                await pods.mark(pod, goes_first=goes_first)


def _is_ours(worker: Worker, pool: PoolKey) -> bool:
    """Whether nobody but a planner of this pool drains it."""
    reasons = worker.drains - {None}
    return bool(reasons) and all(
        why is not None and why.startswith(f"{REASON}: {pool} ") for why in reasons
    )


def _leaver(worker: Worker, pool: PoolKey) -> Leaver:
    """Return one who goes; whom somebody else drains already is his to take back."""
    ours = worker.drains == {None} or _is_ours(worker, pool)
    return Leaver(worker.worker_id, worker.host, ours=ours)
