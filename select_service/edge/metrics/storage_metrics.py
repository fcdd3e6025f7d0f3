"""Metrics of what outlives the process: the state directory, the index snapshot, the recording."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.metric_rows import MetricRow, table, total, value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from indexer.edge.snapshots import IndexSnapshots
    from select_service.edge.driver.driver import Driver
    from select_service.edge.state.journal import Journal
    from select_service.edge.state.keeper import Keeper
    from select_service.edge.state.recording_file import Recording
    from select_service.edge.state.warm_start import WarmStart
    from select_service.metric_rows import Collector
    from select_service.types import StateStatus


class _State(NamedTuple):
    keeper: Keeper
    journal: Journal
    status: StateStatus


class _Snapshot(NamedTuple):
    warm: WarmStart
    snapshots: IndexSnapshots
    recalls: Mapping[str, int]


_STATE: Final[tuple[MetricRow[_State], ...]] = (
    value(
        "state_pending_rows",
        "Changes that are not on disk yet.",
        lambda state: state.status.pending,
    ),
    value(
        "state_writable",
        "1 while the disk takes what is written.",
        lambda state: int(state.status.writable),
    ),
    total("state_commits", "Transactions on disk.", lambda state: state.journal.commits),
    total(
        "state_commit_seconds",
        "Time the writer took for transactions.",
        lambda state: state.journal.commit_seconds,
    ),
    total(
        "state_rows_written", "Records written to disk.", lambda state: state.journal.rows_written
    ),
    total(
        "state_commit_failures",
        "Commits the disk refused; tried again.",
        lambda state: state.journal.failures,
    ),
    total(
        "state_bookings_released",
        "Reservations taken back because a commit failed.",
        lambda state: state.keeper.released,
    ),
    total(
        "state_window_waits",
        "Answers that relaxed durability made wait after all.",
        lambda state: state.journal.window_waits,
    ),
    value("state_waiting", "Answers that wait for the disk.", lambda state: state.journal.waiting),
    total(
        "state_stalls",
        "Commits the disk has had for longer than it may.",
        lambda state: state.journal.stalls,
    ),
    total(
        "state_turned_away",
        "Changes refused because too many answers wait.",
        lambda state: state.journal.turned_away,
    ),
    value(
        "state_restored",
        "Records brought back at the start.",
        lambda state: state.status.restored,
        "kind",
    ),
    value(
        "state_dropped",
        "Records dropped at the start, without a place any more.",
        lambda state: state.status.dropped,
        "kind",
    ),
    value(
        "state_damage",
        "Faults found in the state directory at the start.",
        lambda state: len(state.status.damage),
    ),
    value(
        "state_rows_lost",
        "Records lost to damage, as far as is known.",
        lambda state: state.status.rows_lost,
    ),
)

_SNAPSHOT: Final[tuple[MetricRow[_Snapshot], ...]] = (
    value(
        "index_snapshot_written_timestamp_seconds",
        "When the last index snapshot was written.",
        lambda one: one.snapshots.written_at,
    ),
    value(
        "index_snapshot_seconds",
        "Seconds that the last index snapshot took.",
        lambda one: one.snapshots.seconds,
    ),
    value(
        "index_snapshot_bytes", "Bytes of the last index snapshot.", lambda one: one.snapshots.bytes
    ),
    value(
        "index_snapshot_blocks",
        "Blocks in the last index snapshot, per rank and tier.",
        lambda one: one.snapshots.blocks,
    ),
    value(
        "index_snapshot_ranks", "Ranks in the last index snapshot.", lambda one: one.snapshots.ranks
    ),
    value(
        "index_snapshot_left_out",
        "Ranks left out of the last index snapshot.",
        lambda one: one.snapshots.left_out,
        "reason",
    ),
    total("index_snapshot_writes", "Index snapshots written.", lambda one: one.snapshots.writes),
    total(
        "index_snapshot_failures",
        "Index snapshots that were not written; the old one stays.",
        lambda one: one.snapshots.failures,
        "kind",
    ),
    value(
        "index_snapshot_damage",
        "Faults of the one found at the start.",
        lambda one: one.snapshots.damage,
        "kind",
    ),
    value(
        "index_snapshot_load_seconds",
        "Time spent on loading it.",
        lambda one: one.warm.load_seconds,
    ),
    value(
        "index_snapshot_unproven_ranks",
        "Ranks whose blocks wait for their engine's proof, unseen.",
        lambda one: one.warm.unproven,
    ),
    total(
        "index_snapshot_recalled_ranks",
        "Ranks of an earlier life: credited, or why not.",
        lambda one: one.recalls,
        "outcome",
    ),
)

_RECORDING: Final[tuple[MetricRow[Recording], ...]] = (
    total(
        "recording_notes",
        "Notes for the recording: written, or left out because the queue or the disk was full,"
        " or by a fault.",
        lambda one: one.notes,
        "outcome",
    ),
    total(
        "recording_bytes",
        "Bytes written to the recording, compressed.",
        lambda one: one.bytes_written,
    ),
    total(
        "recording_raw_bytes",
        "Bytes written to the recording, before compression.",
        lambda one: one.raw_bytes,
    ),
    total("recording_files", "Files begun.", lambda one: one.files),
    total("recording_failures", "Writes that failed.", lambda one: one.failures),
    value("recording_queue_bytes", "What waits to be written, about.", lambda one: one.queue_bytes),
    value(
        "recording_refused",
        "1 while the disk refuses what is recorded.",
        lambda one: int(one.is_refused),
    ),
)


def storage_tables(driver: Driver) -> tuple[Collector, ...]:
    """Return the tables; those of what is not in use have no series."""

    def state() -> _State | None:
        keeper = driver.keeper
        return None if keeper is None else _State(keeper, keeper.journal, keeper.status())

    def snapshot() -> _Snapshot | None:
        warm = driver.warm_start
        if warm is None:
            return None
        recalls = Counter(warm.snapshots.rejected)
        recalls.update(driver.core.registry.recalls())
        return _Snapshot(warm, warm.snapshots, recalls)

    return (
        table(_STATE, state),
        table(_SNAPSHOT, snapshot),
        table(_RECORDING, lambda: driver.recording),
    )
