"""`select-sim replay`: repeats a recording, and shows what other weights would have done."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from select_service.simulator.options import pairs_of, weights_with
from select_service.simulator.recording_replay import replay
from select_service.simulator.recordings import files_of
from select_service.simulator.replay_report import html_of
from select_service.simulator.replay_text import as_text, missing
from select_service.simulator.results import expect_writable, write_whole
from select_service.simulator.run_command import write_json
from select_service.types import RouterConfig

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ["DIVERGED", "configure", "execute"]

DIVERGED: Final = 3
"""Exit code: a decision differs from the recorded one."""

DAMAGED: Final = 1
"""Exit code: a file is damaged; its decisions before the damage are made again as recorded."""

_NO_WEIGHTS: Final = frozenset(
    {"use_kv_events", "queue_threshold", "overtaking_s", "overtaking_share"}
)


def configure(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="as given to --record; what was put aside of "
        "it comes first. FILE.000001 alone is a recording, too",
    )
    parser.add_argument(
        "--weights",
        default="",
        metavar="NAME=VALUE,...",
        help="what if these were in force, e.g. overlap_score_credit=0.5,temperature=0; what a "
        "request has asked for itself stays",
    )
    parser.add_argument("--model-name", metavar="NAME", help="of this model only")
    parser.add_argument("--tenant-id", metavar="NAME", help="of this tenant only")
    parser.add_argument(
        "--examples", type=int, default=10, metavar="N", help="changed decisions told (10)"
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    parser.add_argument("--out", metavar="FILE", help="the result as JSON, too")
    parser.add_argument(
        "--report", metavar="FILE", help="the result as one HTML file with plots, too"
    )
    parser.set_defaults(execute=execute)


def execute(args: Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        BadRecording: the recording cannot be read.
        ValueError, OSError: the command cannot be carried out.
        NotWritten: its results cannot be written.
    """
    changes = _changes(args.weights)
    expect_writable(args.out, args.report)
    told = replay(
        files_of(Path(args.file)),
        changes,
        scope=lambda model, tenant: (
            args.model_name in (None, model) and args.tenant_id in (None, tenant)
        ),
        examples=max(0, args.examples),
    )
    if args.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
    else:
        sys.stdout.write(as_text(told))
    if args.out is not None:
        write_json(args.out, told)
    if args.report is not None:
        write_whole(args.report, html_of(told).encode())
    for gap in told.missing if told.is_damaged else ():
        sys.stderr.write(f"select-sim replay: missing: {missing(gap)}\n")
    if not told.is_same:
        return DIVERGED
    return DAMAGED if told.is_damaged else 0


def _changes(text: str) -> dict[str, object]:
    """Return weights by name, as numbers.

    Raises:
        ValueError: a name is unknown, or its value invalid.
    """
    pairs = pairs_of(text, "--weights")
    for name in _NO_WEIGHTS & pairs.keys():
        raise ValueError(f"--weights: {name} decides nothing that a recording could tell")
    if "kv_transfer_cost_per_block" in pairs:
        raise ValueError("--weights: pairs are priced as recorded: try another transfer cost live")
    config = weights_with(RouterConfig(), pairs)
    return {name: getattr(config, name) for name in pairs}
