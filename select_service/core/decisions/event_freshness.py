"""How fresh a rank's KV events are: late, with gaps, or missing, so that an estimate is needed.

`trust_monitor.py` looks at every stream once a second, and applies the verdicts to its ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from indexer.core.stream import EventStream
    from select_service.core.decisions.trust_factors import Reason
    from select_service.core.partition import Partition
    from select_service.types import TrustSettings

PLAUSIBLE_S: Final = 86_400.0
"""If an engine's clock is off by more than a day, no delay can be read from it."""

LOST_SHARE: Final = 0.05
"""The share of batches that may be lost before credit is reduced."""


class Verdict(NamedTuple):
    """What follows from the state of a stream for the ranks whose events it carries."""

    factor: float
    stale: tuple[Reason, ...]
    is_missing: bool = False  # events are: an estimate is needed

    def joined(self, other: Verdict) -> Verdict:
        """Return the worse of two streams' verdicts on a rank."""
        return Verdict(*min(self[:2], other[:2]), self.is_missing or other.is_missing)


FRESH: Final = Verdict(1.0, ())


class StreamWatch:
    """The state of a stream between two looks.

    Attributes:
        gap_since: When the open gap was noticed.
        lag_s: How late its events are; None: unknown.
        cut_since: When the connection to the publisher was lost.
        is_mute: Whether it has never carried any event.
        silent_since: When it was noticed that it has not although the rank has computed prompts.
    """

    __slots__ = ("cut_since", "gap_since", "is_mute", "lag_s", "silent_since")

    def __init__(self) -> None:
        self.gap_since: float | None = None
        self.lag_s: float | None = None
        self.cut_since: float | None = None
        self.silent_since: float | None = None
        self.is_mute = False

    @property
    def may_miss_events(self) -> bool:
        """Whether an estimate may soon be needed."""
        return self.is_mute or self.cut_since is not None

    def look(self, stream: EventStream, now: float, wall_ahead: float | None) -> None:
        """Update the state from the stream."""
        is_open = stream.is_replaying and bool(stream.backlog)
        if not is_open:
            self.gap_since = None
        elif self.gap_since is None:
            self.gap_since = now
        delivery = stream.delivery
        offset, lag_s = delivery.offset_s, delivery.lag_s
        if offset is None or not stream.cursor.is_live:
            self.lag_s = None
            return
        if wall_ahead is None or abs(offset + wall_ahead) >= PLAUSIBLE_S:
            self.lag_s = None
            return
        # after that much silence, nothing is still on its way
        is_over = stream.last_event_at is None or now - stream.last_event_at >= lag_s
        self.lag_s = 0.0 if is_over else lag_s

    def look_for_silence(self, stream: EventStream, partition: Partition, now: float) -> None:
        """Update whether events come at all."""
        rank, index = stream.rank, partition.index
        self.cut_since = stream.unreachable_since
        self.is_mute = stream.last_event_at is None and not index.holds_anything(rank)
        slot = index.slot_of(rank)
        if not self.is_mute or slot is None or not partition.estimate.blocks_of(slot):
            self.silent_since = None
        elif self.silent_since is None:
            self.silent_since = now


def judge(stream: EventStream, watch: StreamWatch, settings: TrustSettings, now: float) -> Verdict:
    """Return how fresh a stream is: lag halves the credit repeatedly, loss takes its share.

    Events are missing where none ever came although the rank has computed prompts, where the
    connection to the publisher is lost, and where batches are lost or awaited.
    """
    factor = 1.0
    stale: list[Reason] = []
    open_s = 0.0 if watch.gap_since is None else now - watch.gap_since
    late: tuple[tuple[float, Reason], ...] = ((watch.lag_s or 0.0, "lag"), (open_s, "gaps"))
    for seconds, reason in late:
        if seconds > settings.lag_grace_s:
            factor *= 0.5 ** ((seconds - settings.lag_grace_s) / settings.lag_half_s)
            stale.append(reason)
    lost = stream.lost_batches - stream.unknown_batches  # others promise nothing false
    if lost and lost > LOST_SHARE * (lost + stream.tallies.batches):
        factor *= 1.0 - lost / (lost + stream.tallies.batches)
        if "gaps" not in stale:
            stale.append("gaps")
    after_s, is_missing = settings.estimate_after_s, False
    if after_s:
        since = [at for at in (watch.cut_since, watch.silent_since) if at is not None]
        is_missing = "gaps" in stale or any(now - at >= after_s for at in since)
    if not settings.weigh_freshness:
        factor, stale = 1.0, []
    return Verdict(factor, tuple(stale), is_missing)
