"""Replicas managed by a client: decisions are published over HTTP, and reported back when done.

Decision ids only grow. A decision that is not reported within its time-out counts as done, so a
dead client does not stop the planner; a report about an older decision changes nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias, get_args

import msgspec

from select_service.planner.edge.connectors.connector import ScalingOutcome
from select_service.planner.types import PoolState, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from select_service.planner.types import PoolKey

TIMEOUT_S: Final = 1800.0
WAIT_MAX_S: Final = 60.0
FOLLOWED_MOST: Final = 2**52
"""Ids continue from what clients have received, up to this: larger ones cannot be decisions, and
from 2**53 on JSON readers round, so a single such request would break the ids for all clients."""
_REASONS_MAX: Final = 20
REPLICAS_MAX: Final = 1_000_000
"""Per pool: no pool has more, and a report that claims so is damaged."""

End: TypeAlias = Literal["done", "failed", "timed_out"]
"""The outcome of a decision: reported by the client, or not reported in time."""
ENDS: Final[tuple[End, ...]] = get_args(End)


class Issued(msgspec.Struct, frozen=True):
    """GET /v1/decision."""

    decision_id: int
    issued_at: float
    targets: list[Target]
    reason: str


class There(Target, frozen=True):
    """The replicas of one pool, as reported by the client that scales it."""

    replicas: Annotated[int, msgspec.Meta(ge=0, le=REPLICAS_MAX)]


class Completion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/decision/{id}/complete."""

    status: Literal["done", "failed"]
    replicas: list[There] = []
    """What there is now, where it is not what was asked for."""
    message: str = ""


class VirtualConnector:
    """Publishes decisions and takes in their outcomes.

    Args:
        start: replicas requested and ready; if they differ, a decision is published at once.
        clock: monotonic seconds.
        wall: seconds since 1970, shown to clients.
        timeout_s: after that a decision counts as done.
        first_id: ids continue after a restart.

    Attributes:
        ends: decisions by outcome, without those superseded by the next.
    """

    sets_all_at_once = True

    def __init__(
        self,
        start: Mapping[PoolKey, PoolState],
        clock: Callable[[], float],
        wall: Callable[[], float],
        timeout_s: float = TIMEOUT_S,
        first_id: int = 0,
    ) -> None:
        self._asked = {pool: state.desired for pool, state in start.items()}
        self._there = {pool: state.ready for pool, state in start.items()}
        self._clock, self._wall = clock, wall
        self._timeout_s = timeout_s
        self._changed = asyncio.Event()
        self._is_ending = False
        self._issued_at = clock()
        self._is_open = False
        self.decision: Issued | None = None
        self.decision_id = first_id
        self.ends = dict.fromkeys(ENDS, 0)
        self.problems: dict[PoolKey, str] = {}
        # the client may have got one from a planner that no longer runs
        if self._asked != self._there:
            self._issue("asked for before the planner was started again")

    async def states(self, pools: Sequence[PoolKey]) -> dict[PoolKey, PoolState]:
        """Return the requested and the reported replicas."""
        if self._is_open and self._clock() - self._issued_at >= self._timeout_s:
            self._close("timed_out", self._asked)
        return {pool: PoolState(self._asked[pool], self._there[pool]) for pool in pools}

    async def apply(self, targets: Sequence[Target], reasons: Sequence[str]) -> ScalingOutcome:
        """Publish a decision; waiting clients get it at once."""
        outcome = ScalingOutcome()
        outcome.done.extend(targets)
        self._asked |= {one.pool: one.replicas for one in targets}
        self._issue("; ".join(reasons[:_REASONS_MAX]))
        return outcome

    def _issue(self, reason: str) -> None:
        self.decision_id += 1
        self._issued_at, self._is_open = self._clock(), True
        every = [Target.of(pool, count) for pool, count in self._asked.items()]
        self.decision = Issued(self.decision_id, self._wall(), every, reason)
        self._changed.set()
        self._changed = asyncio.Event()

    async def next(self, after: int, wait_s: float) -> Issued | None:
        """Return the newest decision above `after`, waiting for one; None: there is none yet.

        The client may have received a later one, from an earlier planner that left no state: ids
        continue from there, or it would receive nothing until they have caught up.
        """
        if self.decision_id < after <= FOLLOWED_MOST:
            self.decision_id = after
            if self.decision is not None:
                self._issue(self.decision.reason)
        if self._newer(after) is None and not self._is_ending:
            changed = self._changed
            try:
                async with asyncio.timeout(min(max(wait_s, 0.0), WAIT_MAX_S)):
                    await changed.wait()
            except TimeoutError:
                return None
        return self._newer(after)

    def _newer(self, after: int) -> Issued | None:
        found = self.decision
        return found if found is not None and found.decision_id > after else None

    def end(self) -> None:
        """Release all clients that wait for a decision: there will be none."""
        self._is_ending = True
        self._changed.set()

    def complete(self, decision_id: int, completion: Completion) -> bool:
        """Apply a report; returns False if no such decision was ever made.

        The newest decision may be reported again: replicas may come later than reported, or the
        report itself may, after its time-out.
        """
        if decision_id > self.decision_id or decision_id < 1:
            return False
        if decision_id < self.decision_id or self.decision is None:
            return True  # it is superseded; nothing depends on it
        reached = {one.pool: one.replicas for one in completion.replicas if one.pool in self._asked}
        if completion.status == "failed":
            for pool in self._asked:
                self.problems[pool] = f"decision {decision_id} failed: {completion.message}"
            self._asked = self._there | reached  # failed changes are no longer requested
        else:
            self.problems = {}
        self._close(completion.status, self._asked | reached)
        return True

    def _close(self, end: End, there: Mapping[PoolKey, int]) -> None:
        self.ends[end] += self._is_open
        self._there = dict(there)
        self._is_open = False

    async def close(self) -> None:
        """Nothing to close."""
