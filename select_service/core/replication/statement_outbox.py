"""Our statements on the replica plane: their numbers, and those that wait for the next batch.

A claim that grew is stated once however often it changed, and as it is by then. `claims.py` fills
it; `plane.py` publishes what is due.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from select_service.core.replication.dynamo_events import Stamp
from select_service.core.replication.messages import Closed, Ended, Grown, Renewed, Said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sized

    from select_service.core.replication.claim import Claim
    from select_service.core.replication.messages import Key, Statement

SEQ_BITS: Final = 40
"""Bits for statements of one life; the epoch is above them, so numbers never repeat."""


class StatementOutbox:
    """Pending statements about claims and leases. All operations O(1).

    Attributes:
        epoch: the number of our life.
        seq: the number of our last statement.
    """

    def __init__(self, router_id: int, epoch: int, output_interval_s: float) -> None:
        """Start; growth by output blocks is stated every `output_interval_s` seconds."""
        self.epoch = epoch
        self.seq = (epoch - 1) << SEQ_BITS
        self._router_id = router_id
        self._output_interval_s = output_interval_s
        self._pending: dict[Key, Claim | str] = {}  # claims that grew, and ids of ended ones
        self._outputs: dict[Key, Claim | str] = {}  # claims that filled blocks; stated together
        self._outputs_said_at = 0.0
        self._lease_news: dict[str, Renewed | Closed] = {}  # one per lease; see `say_of_lease`
        self._ready: list[tuple[int, Said]] = []  # to be published once so much is on disk

    def __len__(self) -> int:
        return len(self._pending) + len(self._lease_news)

    # -- numbers -------------------------------------------------------------------------------

    def stamp(self, of: Iterable[Claim] = ()) -> Stamp:
        """Number the statement that is about to be published."""
        self.seq += 1
        return Stamp(self.epoch, self.seq, [one.key for one in of])

    def say(self, items: list[Statement]) -> Said:
        """Put statements under the next number."""
        self.seq += 1
        return Said(self._router_id, self.epoch, self.seq, items)

    # -- what waits ----------------------------------------------------------------------------

    def say_later(self, what: Claim | Ended) -> None:
        """Queue growth or an end for the next batch, once however often it changed.

        The statement will have the state at that time, including further growth and the heir.
        """
        if isinstance(what, Ended):
            self._pending[what.owner, what.born] = what.reservation_id
        else:
            self._pending.setdefault(what.key, what)

    def say_of_lease(self, what: Renewed | Closed) -> None:
        """Queue a statement for the next batch, one per lease; a close is not replaced."""
        if not isinstance(self._lease_news.get(what.lease_id), Closed):
            self._lease_news[what.lease_id] = what

    def say_outputs(self, claim: Claim) -> None:
        """Queue the output blocks of a claim; see `release_outputs`."""
        self._outputs.setdefault(claim.key, claim)

    def release_outputs(self, now: float) -> None:
        """Periodically queue the claims that filled output blocks.

        A stream fills several blocks a second, and others' view of its load is off by at most those
        few. The reference's plane has no output blocks at all.
        """
        if now - self._outputs_said_at >= self._output_interval_s:
            self._outputs_said_at = now
            if self._outputs:
                self._outputs.update(self._pending)  # at C speed, however many
                self._pending, self._outputs = self._outputs, {}

    def drop(self, claim: Claim) -> None:
        """Do not state a claim that is over any more."""
        self._pending.pop(claim.key, None)

    def batch(
        self,
        limit: int,
        grown: Callable[[Claim], Grown],
        ended: Callable[[str, Key], Ended],
    ) -> Said | None:
        """Return up to `limit` of the pending statements, made by `grown` and `ended`."""
        items: list[Statement] = [
            self._lease_news.pop(name) for name in list(islice(self._lease_news, limit))
        ]
        for key in list(islice(self._pending, limit - len(items))):
            what = self._pending.pop(key)
            if isinstance(what, str):
                items.append(ended(what, key))
            elif not what.dead:
                items.append(grown(what))
        return self.say(items) if items else None

    # -- what waits for the disk ---------------------------------------------------------------

    def say_when_durable(self, said: Said, ordinal: int) -> None:
        """Hold a statement back until so many changes are on disk."""
        self._ready.append((ordinal, said))

    def take_ready(self, durable: float) -> list[Said]:
        """Return the statements held back that may be published, as `durable` is on disk."""
        ready = [said for ordinal, said in self._ready if ordinal <= durable]
        self._ready = [one for one in self._ready if one[0] > durable]
        return ready

    def tables(self) -> Iterator[Sized]:
        """Yield the dicts that grow with claims; see `dict_compaction.py`."""
        yield from (self._pending, self._outputs)
