"""Metrics of the index and of the event streams that feed it, read at scrape time."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from indexer.types import Tier
from select_service.edge.metrics.families import (
    RANK,
    ROWS_PER_STEP,
    SCOPE,
    Collector,
    counter,
    gauge,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from indexer.core.index_size import IndexStats
    from indexer.core.stream import EventStream
    from indexer.core.stream_counters import StreamCounters
    from select_service.edge.driver.driver import Driver
    from select_service.edge.metrics.families import Steps
    from select_service.edge.metrics.scope_series import ScopeGroups
    from select_service.settings import Settings

__all__ = ["IndexMetrics"]

_STREAM_STATES: Final = ("silent", "current", "uncertain", "replaying")

_STREAM_COUNTERS: Final = (
    ("messages", "KV-event messages received live, good or bad."),
    ("batches", "KV-event batches applied, live or replayed."),
    ("blocks_stored", "Blocks in store events that were applied."),
    ("blocks_removed", "Blocks in removals that were applied."),
    ("stale_batches", "Batches that had been applied before."),
    ("conflicting_batches", "Live batches under a number that had come with another content."),
    ("conflicting_replies", "Replies that repeat otherwise what had come before."),
    ("gaps", "Times sequence numbers were missing."),
    ("lost_batches", "KV-event batches that were never recovered."),
    ("unusable_batches", "Of these, the ones that were too long, or that nobody could read."),
    ("restarts", "Engine restarts seen by the sequence number."),
    ("hidden_restarts", "Engine restarts seen only through a replay."),
    ("foreign_ranks", "Batches that named a rank the worker does not have."),
    ("replays_asked", "Replays asked for."),
    ("replayed_batches", "Batches applied from replays."),
)


class IndexMetrics(Collector):
    """Index and event streams."""

    def __init__(self, service: Driver, settings: Settings, groups: ScopeGroups) -> None:
        self._service = service
        self._groups = groups
        self._rank_series_max = settings.metrics_rank_series_max

    @override
    def collect(self) -> Steps:
        yield from self._indexes()
        yield from self._streams()
        yield from self._events()

    def _indexes(self) -> Steps:
        nodes = gauge("index_nodes", "Nodes of the radix tree.", SCOPE)
        blocks = gauge("index_blocks", "Distinct blocks in the index.", SCOPE)
        holdings = gauge("index_holdings", "(rank, block) pairs held.", (*SCOPE, "tier"))
        size = gauge("index_bytes", "Memory of the index, estimated.", SCOPE)
        unswept = gauge("index_unswept", "Deferred removals not done yet.", SCOPE)
        orphans = gauge("index_orphan_blocks", "Blocks that wait for their parent.", SCOPE)
        dropped = counter(
            "index_orphan_blocks_dropped", "Waiting blocks dropped to make room.", SCOPE
        )
        refused = counter("index_events_refused", "Stores that contradict themselves.", SCOPE)
        for scope, partitions, _ in self._groups.found:
            stats: list[IndexStats] = []
            for one in partitions:
                counted = yield from one.index.count_in_steps()
                stats.append(counted)
                yield None
            by_attribute = (
                (nodes, "nodes"),
                (blocks, "blocks"),
                (size, "bytes"),
                (unswept, "unswept"),
                (orphans, "orphan_blocks"),
                (dropped, "orphan_blocks_dropped"),
                (refused, "events_refused"),
            )
            for family, attribute in by_attribute:
                family.add_metric(scope, sum(getattr(one, attribute) for one in stats))
                yield None
            for tier in Tier:
                held = sum(one.holdings[tier] for one in stats)
                holdings.add_metric([*scope, tier.wire_name], held)
                yield None
        yield from (nodes, blocks, holdings, size, unswept, orphans, dropped, refused)

    def _streams(self) -> Steps:
        by_state = gauge("kv_listeners", "KV-event listeners.", ("state",))
        listener = gauge("kv_listener_state", "1 for the state it is in.", (*RANK, "state"))
        lag = gauge(
            "kv_listener_lag_seconds", "Age of the last KV event, by the engine's clock.", RANK
        )
        wall_now = time.time()  # noqa: TID251 - compared with the engines' wall clocks
        states: Counter[str] = Counter()
        for number, stream in enumerate(self._service.core.registry.streams(), 1):
            states[state := _state(stream)] += 1
            if not number % ROWS_PER_STEP:
                yield None
            if number > self._rank_series_max:
                continue
            labels = (str(stream.rank.worker_id), str(stream.rank.dp_rank), *stream.scope)
            listener.add_metric([*labels, state], 1)
            seconds = stream.lag(wall_now)
            if seconds is not None:
                lag.add_metric(labels, seconds)
        for state in _STREAM_STATES:
            by_state.add_metric([state], states[state])
        yield from (by_state, listener, lag)

    def _events(self) -> Steps:
        tallies = [(one.scope, one.tallies) for one in self._groups.found]
        for name, text in _STREAM_COUNTERS:
            family = counter(f"kv_{name}", text, SCOPE)
            for scope, tally in tallies:
                family.add_metric(scope, getattr(tally, name))
            yield family
        yield from _labelled("kv_events", "KV events.", ("kind", "dialect", "outcome"), tallies)
        yield from _labelled("kv_bad_messages", "Messages that are no batch.", ("reason",), tallies)
        yield from _labelled("kv_replays", "Replays that have ended.", ("outcome",), tallies)


def _state(stream: EventStream) -> str:
    if stream.is_replaying:
        return "replaying"
    if stream.kv_state == "uncertain":
        return "uncertain"
    return "silent" if stream.last_event_at is None else "current"


def _labelled(
    name: str,
    text: str,
    labels: Sequence[str],
    tallies: Iterable[tuple[Sequence[str], StreamCounters]],
) -> Steps:
    """Turn one dict of every tally into a family; its keys are label values."""
    family = counter(name, text, (*SCOPE, *labels))
    for scope, tally in tallies:
        counts: dict[str | tuple[str, ...], int] = getattr(tally, name.removeprefix("kv_"))
        for key, count in sorted(counts.items(), key=str):
            values = (key,) if isinstance(key, str) else key
            family.add_metric([*scope, *values], count)
        yield None
    yield family
