"""Metrics of the index and of the event streams that feed it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.core.dump import TIER_OF
from select_service.edge.driver.sources import state_of
from select_service.edge.metrics.scope_series import RANK, SCOPE, by_scope
from select_service.metric_rows import MetricRow, MetricTable, paced, total, value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.core.index_size import IndexStats
    from indexer.core.registry import StreamRegistry
    from indexer.core.stream_counters import StreamCounters
    from select_service.core.ledger.cache_estimate import CacheEstimate
    from select_service.core.partition import Partition
    from select_service.edge.driver.driver import Driver
    from select_service.edge.metrics.scope_series import ScopeGroups, Sources
    from select_service.metric_rows import Collector
    from select_service.settings import Settings

_STREAM_STATES: Final = ("silent", "current", "uncertain", "replaying")

_INDEX: Final[tuple[MetricRow[IndexStats], ...]] = (
    value("index_nodes", "Nodes of the radix tree.", lambda stats: stats.nodes),
    value("index_blocks", "Distinct blocks in the index.", lambda stats: stats.blocks),
    value(
        "index_holdings",
        "(rank, block) pairs held.",
        lambda stats: {name: stats.holdings[tier] for name, tier in TIER_OF.items()},
        "tier",
    ),
    value("index_bytes", "Memory of the index, estimated.", lambda stats: stats.bytes),
    value("index_unswept", "Deferred removals not done yet.", lambda stats: stats.unswept),
    value(
        "index_orphan_blocks",
        "Blocks that wait for their parent.",
        lambda stats: stats.orphan_blocks,
    ),
    total(
        "index_orphan_blocks_dropped",
        "Waiting blocks dropped to make room.",
        lambda stats: stats.orphan_blocks_dropped,
    ),
    total(
        "index_events_refused",
        "Stores that contradict themselves.",
        lambda stats: stats.events_refused,
    ),
)

_ESTIMATES: Final[tuple[MetricRow[CacheEstimate], ...]] = (
    value(
        "kv_estimate_ranks",
        "Ranks matched by an estimate, for want of KV events.",
        lambda estimate: estimate.ranks,
    ),
    value(
        "kv_estimate_blocks",
        "Blocks that ranks are estimated to hold.",
        lambda estimate: estimate.blocks,
    ),
)

_LISTENERS: Final[tuple[MetricRow[dict[str, int]], ...]] = (
    value("kv_listeners", "KV-event listeners.", lambda states: states, "state"),
)


class _Stream(NamedTuple):
    state: str
    lag_s: float | None


_STREAMS: Final[tuple[MetricRow[_Stream], ...]] = (
    value(
        "kv_listener_state", "1 for the state it is in.", lambda stream: {stream.state: 1}, "state"
    ),
    value(
        "kv_listener_lag_seconds",
        "Age of the last KV event, by the engine's clock.",
        lambda stream: stream.lag_s,
    ),
)

_EVENTS: Final[tuple[MetricRow[StreamCounters], ...]] = (
    total(
        "kv_messages",
        "KV-event messages received live, good or bad.",
        lambda counted: counted.messages,
    ),
    total(
        "kv_batches", "KV-event batches applied, live or replayed.", lambda counted: counted.batches
    ),
    total(
        "kv_blocks_stored",
        "Blocks in store events that were applied.",
        lambda counted: counted.blocks_stored,
    ),
    total(
        "kv_blocks_removed",
        "Blocks in removals that were applied.",
        lambda counted: counted.blocks_removed,
    ),
    total(
        "kv_stale_batches",
        "Batches that had been applied before.",
        lambda counted: counted.stale_batches,
    ),
    total(
        "kv_conflicting_batches",
        "Live batches under a number that had come with another content.",
        lambda counted: counted.conflicting_batches,
    ),
    total(
        "kv_conflicting_replies",
        "Replies that repeat otherwise what had come before.",
        lambda counted: counted.conflicting_replies,
    ),
    total("kv_gaps", "Times sequence numbers were missing.", lambda counted: counted.gaps),
    total(
        "kv_lost_batches",
        "KV-event batches that were never recovered.",
        lambda counted: counted.lost_batches,
    ),
    total(
        "kv_unusable_batches",
        "Of these, the ones that were too long, or could not be read.",
        lambda counted: counted.unusable_batches,
    ),
    total(
        "kv_restarts",
        "Engine restarts seen by the sequence number.",
        lambda counted: counted.restarts,
    ),
    total(
        "kv_hidden_restarts",
        "Engine restarts seen only through a replay.",
        lambda counted: counted.hidden_restarts,
    ),
    total(
        "kv_foreign_ranks",
        "Batches that named a rank the worker does not have.",
        lambda counted: counted.foreign_ranks,
    ),
    total("kv_replays_asked", "Replays asked for.", lambda counted: counted.replays_asked),
    total(
        "kv_replayed_batches",
        "Batches applied from replays.",
        lambda counted: counted.replayed_batches,
    ),
    total(
        "kv_events",
        "KV events.",
        lambda counted: counted.events,
        "kind",
        "dialect",
        "outcome",
    ),
    total(
        "kv_bad_messages",
        "Messages that are no batch.",
        lambda counted: counted.bad_messages,
        "reason",
    ),
    total(
        "kv_replays",
        "Replays that have ended.",
        lambda counted: counted.replays,
        "outcome",
    ),
)


def index_tables(driver: Driver, settings: Settings, groups: ScopeGroups) -> tuple[Collector, ...]:
    """Return indexes by scope, streams by rank, events by scope."""
    registry, series_max = driver.core.registry, settings.metrics_rank_series_max

    def indexes() -> Sources[IndexStats]:
        for group in groups.found:
            yield group.scope, _counted(group.partitions)
            yield None

    def events() -> Sources[StreamCounters]:
        for group in groups.found:
            yield group.scope, (group.tallies,)
            yield None

    return (
        MetricTable(_INDEX, indexes, SCOPE),
        MetricTable(_ESTIMATES, by_scope(groups, lambda one: one.estimate), SCOPE),
        MetricTable(_LISTENERS, lambda: [((), _by_state(registry))]),
        MetricTable(_STREAMS, lambda: _by_rank(registry, series_max), RANK),
        MetricTable(_EVENTS, events, SCOPE),
    )


def _counted(partitions: list[Partition]) -> Iterator[IndexStats | None]:
    for one in partitions:
        yield (yield from one.index.count_in_steps())
        yield None


def _by_state(registry: StreamRegistry) -> Iterator[dict[str, int] | None]:
    """Yield None between steps, then how many streams are in each state."""
    states = dict.fromkeys(_STREAM_STATES, 0)
    for stream in paced(registry.streams()):
        if stream is None:
            yield None
        else:
            states[state_of(stream)] += 1
    yield states


def _by_rank(registry: StreamRegistry, series_max: int) -> Sources[_Stream]:
    wall_now = time.time()  # noqa: TID251 - compared with the engines' wall clocks
    for stream in paced(registry.streams()[:series_max]):
        if stream is None:
            yield None
            continue
        labels = (str(stream.rank.worker_id), str(stream.rank.dp_rank), *stream.scope)
        yield labels, (_Stream(state_of(stream), stream.lag(wall_now)),)
