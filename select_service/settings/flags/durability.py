"""What outlives the process: state, snapshots of the index, the recording."""

from __future__ import annotations

from typing import Final

from select_service.settings.defaults import Durability
from select_service.settings.flags import values
from select_service.settings.flags.flag import Flag

KEEPING: Final = (
    Flag(
        "--state-dir",
        str,
        "DIR",
        "keep workers, reservations, leases and the index here and bring them back; one process"
        " per directory",
    ),
    Flag(
        "--durability",
        values.member(Durability),
        "strict|relaxed",
        "with --state-dir: acknowledge a change once it is on disk, or at once",
    ),
    Flag(
        "--durability-window-s",
        values.seconds(zero=False),
        "S",
        "with relaxed durability: a crash loses at most the changes of this long; while the disk is"
        " further behind, answers wait",
        watch="state_window_waits_total",
    ),
    Flag(
        "--state-stall-s",
        values.seconds(zero=False),
        "S",
        "a disk that has not finished a commit for this long counts as refusing, until it has",
        watch="state_stalls_total",
    ),
    Flag(
        "--state-waiting-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "answers that wait for the disk, also those of clients that are gone; beyond, changes are "
        "refused",
        watch="state_waiting",
    ),
    Flag(
        "--index-snapshot-interval-s",
        values.seconds(zero=True),
        "S",
        "with --state-dir: write the index there this often and at the end; 0 = neither write nor"
        " read it",
        watch="index_snapshot_written_timestamp_seconds",
    ),
    Flag(
        "--index-snapshot-bytes-max",
        values.whole(1, values.BYTES_MAX),
        "N",
        "longest index snapshot; ranks beyond are left out",
        watch='index_snapshot_left_out{reason="no_room"}',
    ),
    Flag(
        "--index-snapshot-hold-s",
        values.seconds(zero=False),
        "S",
        "longest time that a rank's events wait while its snapshot is taken; beyond, left out",
        watch='index_snapshot_left_out{reason="slow"}',
    ),
    Flag(
        "--index-snapshot-proof-s",
        values.seconds(zero=False),
        "S",
        "a rank without a replay endpoint may stay silent this long after a restart, then its"
        " blocks of the snapshot are dropped",
        watch='index_snapshot_recalled_ranks_total{outcome="unheard"}',
    ),
    Flag(
        "--index-snapshot-shutdown-s",
        values.seconds(zero=False),
        "S",
        "longest wait for the last index snapshot at the end",
        watch="index_snapshot_written_timestamp_seconds",
    ),
    Flag(
        "--record",
        str,
        "FILE",
        "write requests (hashes only), KV events, lifecycle calls and decisions here, for"
        " `select-sim replay`",
        watch="recording_notes_total",
    ),
    Flag(
        "--record-bytes-max",
        values.whole(1 << 16, values.BYTES_MAX),
        "N",
        "with --record: compressed bytes of a file, then another one begins",
        watch="recording_files_total",
    ),
    Flag(
        "--record-files-max",
        values.whole(1, 100_000),
        "N",
        "with --record: files kept, the oldest goes",
        watch="recording_files_total",
    ),
    Flag(
        "--record-queue-bytes-max",
        values.whole(1 << 16, values.BYTES_MAX),
        "N",
        "with --record: what waits for its writer, about; beyond, it is left out of the recording",
        watch='recording_notes_total{outcome="queue"}',
    ),
    Flag(
        "--record-flush-s",
        values.seconds(zero=False),
        "S",
        "with --record: a crash takes no more than this with it",
        watch="recording_queue_bytes",
    ),
)
