"""What a worker costs, and what other weights would say."""

from __future__ import annotations

from typing import Final

from select_service.settings.flags import values
from select_service.settings.flags.flag import Flag

CHOICE: Final = (
    Flag(
        "--policy",
        values.choice("kv-cost", "first-token"),
        "NAME",
        "how ranks are priced: kv-cost, the contract's formula, or first-token, by when the first "
        "token comes",
    ),
    Flag(
        "--decode-load-scale",
        values.number(0.0, 1e6),
        "X",
        "what a block held while decoding costs, in blocks to compute; off: as --policy has it",
    ),
    Flag(
        "--delay-scale",
        values.number(0.0, 1e6),
        "X",
        "what a prompt's own prefill costs each of those behind it; off: as --policy has it",
    ),
    Flag(
        "--eviction-scale",
        values.number(0.0, 1e6),
        "X",
        "cost of each block that a prompt evicts from an average cache where all of every prompt "
        "is found cached, less where less is found; off: as --policy has it",
    ),
    Flag(
        "--expects-booked",
        values.yes_or_no,
        "yes|no",
        "whether blocks that other reservations cover count as cached; off: as --policy has it",
    ),
    Flag(
        "--context-load-scale",
        values.number(0.0, 1e6),
        "X",
        "cost of each block that a request attends to, in blocks to compute; a shared one counts "
        "for each request; off: as --policy has it",
    ),
    Flag(
        "--pace-scale",
        values.number(0.0, 1.0),
        "X",
        "share of what a rank can have computed since it was last heard of that counts as gone "
        "from its queue; off: as --policy has it",
    ),
    Flag(
        "--overtaking-s",
        values.number(0.0, 1e6),
        "S",
        "where no policy file orders the queue, a waiting request is overtaken by one that comes "
        "up to this many seconds later for each 1,000 tokens less to compute; "
        "off: as --policy has it",
        watch="selections_queued_total",
    ),
    Flag(
        "--overtaking-share",
        values.number(0.0, 1.0),
        "X",
        "or, where queues are long, by one that comes up to this share of the wait later; the "
        "longer of the two counts; off: as --policy has it",
        watch="selections_queued_total",
    ),
    Flag(
        "--kv-transfer-cost-per-block",
        values.weight,
        "BLOCKS",
        "what moving one KV block from a prefill to a decode worker costs, in blocks of prefill",
    ),
    Flag(
        "--shadow-weights",
        values.shadow_weights,
        "NAME=VALUE,...|JSON|@FILE",
        "weights that score live traffic and act on nothing, where they differ from those in force;"
        " {} = none",
        watch="shadow_decisions_total",
        reloads=True,
    ),
    Flag(
        "--shadow-sample",
        values.number(0.0001, 1.0),
        "SHARE",
        "share of the decisions that they score",
        watch='shadow_skipped_total{reason="sample"}',
        reloads=True,
    ),
    Flag(
        "--shadow-cost-max",
        values.number(0.0001, 1.0),
        "SHARE",
        "share of the time that scoring may take; once it is spent, decisions are skipped",
        watch='shadow_skipped_total{reason="budget"}',
        reloads=True,
    ),
)
