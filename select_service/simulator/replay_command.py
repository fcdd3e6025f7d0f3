"""`select-sim replay`: repeats a recording, and shows what other weights would have done."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from select_service.settings.command_line import read_section
from select_service.simulator.command_options import ReplayOptions
from select_service.simulator.progress_bar import progress_bar
from select_service.simulator.recording_replay import replay
from select_service.simulator.recordings import files_of
from select_service.simulator.replay_report import html_of
from select_service.simulator.replay_text import as_text, missing
from select_service.simulator.results import expect_writable
from select_service.simulator.run_command import deliver
from select_service.simulator.settings import weights_with
from select_service.types import RouterConfig

if TYPE_CHECKING:
    from argparse import Namespace

DIVERGED: Final = 3
"""Exit code: a decision differs from the recorded one."""

DAMAGED: Final = 1
"""Exit code: a file is damaged; its decisions before the damage are made again as recorded."""

_NO_WEIGHTS: Final = frozenset(
    {"use_kv_events", "kv_events_default", "queue_threshold", "overtaking_s", "overtaking_share"}
)


def execute(args: Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        BadRecording: the recording cannot be read.
        ValueError, OSError: the command cannot be carried out.
        NotWritten: its results cannot be written.
    """
    options = read_section(ReplayOptions, args)
    changes = _changes(options.weights)
    expect_writable(options.out, options.report)
    files = files_of(Path(args.file))
    size = sum(file.stat().st_size for file in files)
    with progress_bar("replaying", size, quiet=options.quiet) as progress:
        result = replay(
            files,
            changes,
            scope=lambda model, tenant: (
                options.model_name in (None, model) and options.tenant_id in (None, tenant)
            ),
            examples=options.examples,
            progress=progress,
        )
    if options.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    else:
        sys.stdout.write(as_text(result))
    deliver(options, result, lambda: html_of(result, args.command_line))
    for gap in result.missing if result.is_damaged else ():
        sys.stderr.write(f"select-sim replay: missing: {missing(gap)}\n")
    if not result.is_same:
        return DIVERGED
    return DAMAGED if result.is_damaged else 0


def _changes(pairs: dict[str, str]) -> dict[str, object]:
    """Return weights by name, as numbers.

    Raises:
        ValueError: a name is unknown, or its value invalid.
    """
    for name in _NO_WEIGHTS & pairs.keys():
        raise ValueError(f"--weights: {name} decides nothing that a recording could show")
    recorded = {
        "kv_transfer_cost_per_block",
        "kv_transfer_cost_by_domain",
        "kv_pull",
        "kv_pull_costs",
    }
    if pairs.keys() & recorded:
        raise ValueError("--weights: moving blocks is priced as recorded: try other costs live")
    try:
        config = weights_with(RouterConfig(), pairs)
    except ValueError as error:
        raise ValueError(f"--weights: {error}") from None
    return {name: getattr(config, name) for name in pairs}
