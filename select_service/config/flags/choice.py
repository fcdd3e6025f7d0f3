"""What a worker costs, and what other weights would say."""

from __future__ import annotations

from typing import Final

from select_service.config.flags import values
from select_service.config.flags.flag import Flag

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
        "what is lost with each block that a prompt pushes out of an average cache where all of "
        "every prompt is found, less where less is; off: as --policy has it",
    ),
    Flag(
        "--expects-booked",
        values.yes_or_no,
        "yes|no",
        "whether blocks that others are booked with count as cached; off: as --policy has it",
    ),
    Flag(
        "--context-load-scale",
        values.number(0.0, 1e6),
        "X",
        "what a block that a request attends to costs, shared ones for each, in blocks to compute; "
        "off: as --policy has it",
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
        "who waits, where no policy file orders the queue, is overtaken by who comes up to so many "
        "seconds later for each 1,000 tokens less to compute; off: as --policy has it",
        watch="selections_queued_total",
    ),
    Flag(
        "--overtaking-share",
        values.number(0.0, 1.0),
        "X",
        "or, where lines are long, by who comes up to this share of the wait later; the longer of "
        "the two counts; off: as --policy has it",
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
        "of the decisions they score",
        watch='shadow_skipped_total{reason="sample"}',
        reloads=True,
    ),
    Flag(
        "--shadow-cost-max",
        values.number(0.0001, 1.0),
        "SHARE",
        "of the time that may go into it; once it is spent, decisions are skipped",
        watch='shadow_skipped_total{reason="budget"}',
        reloads=True,
    ),
)
