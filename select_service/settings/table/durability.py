"""What outlives the process: state, snapshots of the index, the recording."""

from typing import Annotated, Final

from indexer.limits import SnapshotLimits, StreamLimits
from select_service.settings.table.discovery import DiscoverySettings
from select_service.settings.value_types import (
    Durability,
    count,
    member,
    seconds,
    size,
    text,
    whole,
)
from select_service.types import StateLimits

_STREAMS: Final = StreamLimits()
_SNAPSHOTS: Final = SnapshotLimits()
_STATE: Final = StateLimits()


class DurabilitySettings(DiscoverySettings, frozen=True, kw_only=True):
    """What outlives the process: state, snapshots of the index, the recording."""

    state_dir: Annotated[
        str | None,
        text("DIR").common(),
        "keep workers, reservations, leases and the index here and bring them back; one "
        "process per directory",
    ] = None
    durability: Annotated[
        Durability,
        member(Durability),
        "with --state-dir: acknowledge a change once it is on disk, or at once",
    ] = Durability.STRICT
    durability_window_s: Annotated[
        float,
        seconds().watched("state_window_waits_total"),
        "with relaxed durability: a crash loses at most the changes of this long; while the "
        "disk is further behind, answers wait",
    ] = 0.05
    state_stall_s: Annotated[
        float,
        seconds().watched("state_stalls_total"),
        "a disk that has not finished a commit for this long counts as refusing, until it has",
    ] = _STATE.stall_s
    state_waiting_max: Annotated[
        int,
        count().watched("state_waiting"),
        "answers that wait for the disk, also those of clients that are gone; beyond, "
        "changes are refused",
    ] = _STATE.waiting_max
    index_snapshot_interval_s: Annotated[
        float,
        seconds(zero=True).watched("index_snapshot_written_timestamp_seconds"),
        "with --state-dir: write the index there this often and at the end; 0 = neither "
        "write nor read it",
    ] = _SNAPSHOTS.interval_s
    index_snapshot_bytes_max: Annotated[
        int,
        size().watched('index_snapshot_left_out{reason="no_room"}'),
        "longest index snapshot; ranks beyond are left out",
    ] = _SNAPSHOTS.bytes_max
    index_snapshot_hold_s: Annotated[
        float,
        seconds().watched('index_snapshot_left_out{reason="slow"}'),
        "longest time that a rank's events wait while its snapshot is taken; beyond, left out",
    ] = _SNAPSHOTS.hold_s
    index_snapshot_proof_s: Annotated[
        float,
        seconds().watched('index_snapshot_recalled_ranks_total{outcome="unheard"}'),
        "a rank without a replay endpoint may stay silent this long after a restart, then "
        "its blocks of the snapshot are dropped",
    ] = _STREAMS.recall_wait_s
    index_snapshot_shutdown_s: Annotated[
        float,
        seconds().watched("index_snapshot_written_timestamp_seconds"),
        "longest wait for the last index snapshot when the process ends",
    ] = _SNAPSHOTS.shutdown_s
    record: Annotated[
        str | None,
        text("FILE").watched("recording_notes_total"),
        "write requests (hashes only), KV events, lifecycle calls and decisions here, for "
        "`select-sim replay`",
    ] = None
    record_bytes_max: Annotated[
        int,
        size(1 << 16).watched("recording_files_total"),
        "with --record: compressed bytes of a file before the next one begins",
    ] = 64 << 20  # of a file: some hundred thousand decisions
    record_files_max: Annotated[
        int,
        whole(1, 100000).watched("recording_files_total"),
        "with --record: files kept; the oldest is deleted",
    ] = 8
    record_queue_bytes_max: Annotated[
        int,
        size(1 << 16).watched('recording_notes_total{outcome="queue"}'),
        "with --record: bytes that wait for the writer, roughly; more is left out of the recording",
    ] = 16 << 20  # a second of ten thousand decisions
    record_flush_s: Annotated[
        float,
        seconds().watched("recording_queue_bytes"),
        "with --record: a crash loses at most this much time",
    ] = 1.0
