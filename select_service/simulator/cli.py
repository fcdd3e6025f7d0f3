"""`select-sim`: try a policy before it serves real requests.

Exit codes: 0 done, 1 a line of input, a recording or a measurement that cannot be read, or a result
that cannot be written (where is reported), 2 wrong usage or configuration, 3 a replayed decision is
another one than was recorded, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from select_service import interrupts
from select_service.core.recording.decoder import BadRecording
from select_service.settings.command_line import add_flags, read_section
from select_service.simulator import calibrate as calibrate_command
from select_service.simulator import capacity as capacity_command
from select_service.simulator import replay_command, run_command
from select_service.simulator import sweep as sweep_command
from select_service.simulator.admit import PolicyTrial, read_arrivals
from select_service.simulator.command_options import (
    SECTIONS,
    AdmitOptions,
    CapacityOptions,
    QueueOptions,
    RunOptions,
    SweepOptions,
    add_options,
    admission_policies,
)
from select_service.simulator.gateway_queue import QueueSettings, carry_out
from select_service.simulator.measured_points import BadResult
from select_service.simulator.results import NotWritten
from select_service.simulator.traces import BadTrace
from select_service.standard_output import CommandParser, command_line, complain, printing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    _Commands = argparse._SubParsersAction[CommandParser]  # noqa: SLF001 - it has no public name

INTERRUPTED: Final = 130
"""Exit code, by the convention of shells."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    return printing(partial(_run, argv), "select-sim", unread=1)


def _run(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    interrupts.raise_again()
    args.command_line = command_line("select-sim", argv)
    if args.command in ("admit", "queue"):
        code: int = args.execute(args)
        return code
    return _carry_out(args, args.parser)


def parser() -> CommandParser:
    """Return the parser of all commands."""
    whole = CommandParser(
        prog="select-sim",
        description="Tries a policy in front of simulated engines, before it serves real "
        "requests. Exit codes: 0 done, 1 input that cannot be read or a result that cannot be "
        "written, 2 wrong usage, 3 a replayed decision is another one than was recorded, 130 "
        "Ctrl-C.",
        examples="select-sim run --workload chat,rate=2,requests=500 --block-size 64\n"
        "select-sim replay recording --weights policy=first-token --report replay.html",
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_policies(commands)
    _add_runs(commands)
    _add_readers(commands)
    for one in commands.choices.values():
        one.set_defaults(parser=one)
    return whole


def _add_policies(commands: _Commands) -> None:
    """Add the commands that ask policies line by line."""
    admit = commands.add_parser(
        "admit",
        help="Tells which arrivals an admission policy lets in.",
        description="Reads arrivals as JSON lines (t_us, tokens, slo_class, tenant, and optionally "
        "output_tokens, slo_ttft_ms, snapshots, tenant_in_flight) from standard input and writes "
        'one line {"admitted": bool, "reason": str} for each, in the same order.',
        examples="select-sim admit --policy token-bucket --config '{\"capacity\": 5}' "
        "< arrivals.jsonl",
    )
    admit.epilog = f"{admit.epilog}\n\n{admission_policies()}"
    add_flags(admit, SECTIONS["admit"])
    admit.set_defaults(execute=_admit)
    queue = commands.add_parser(
        "queue",
        help="Runs the queue of a gateway (flow control) on given operations.",
        description="Reads operations as JSON lines (op: enqueue with id, class, tenant; or "
        "dequeue_gated with saturation, or snapshots for the detector to judge) from standard "
        "input and writes each with what became of it: outcome and victim, or the id that goes.",
        examples="select-sim queue < operations.jsonl",
    )
    add_flags(queue, SECTIONS["queue"])
    queue.set_defaults(execute=_queue)


def _add_runs(commands: _Commands) -> None:
    """Add the commands that simulate clusters."""
    run = commands.add_parser(
        "run",
        help="Compares policies side by side on a simulated cluster.",
        description="Runs the service's selection code, and other routers beside it, before "
        "simulated engines with a simulated clock; reports times to first token, hit rates and "
        "spread of load.",
        examples="select-sim run --policy all --workload agents,rate=2,requests=600 "
        "--block-size 64 --report report.html\n"
        "select-sim run --trace conversation.jsonl --workers 16 --seeds 5",
    )
    add_options(run, RunOptions)
    run.set_defaults(execute=run_command.execute)
    sweep = commands.add_parser(
        "sweep",
        help="Runs many weights, and shows which of them no others beat.",
        description="Runs the selection code with many weights and several seeds, and prints the "
        "Pareto front of what was aimed at, with 95 % intervals, and kv-cost with its defaults.",
        examples="select-sim sweep --vary overlap_score_credit=0.5,1 "
        "--workload agents,rate=2,requests=300 --block-size 64",
    )
    add_options(sweep, SweepOptions)
    sweep.set_defaults(execute=sweep_command.execute)
    capacity = commands.add_parser(
        "capacity",
        help="Finds the load that each policy carries within targets, or the workers that takes.",
        description="Bisects the load of a trace (as a share of the fleet's capacity) or the rates "
        "of workloads, until nine of ten requests are just in time by --slo-ttft and --slo-itl. "
        "With --find workers, it looks for the number of workers at the load given.",
        examples="select-sim capacity --trace conversation.jsonl --slo-ttft 2 --slo-itl 0.025\n"
        "select-sim capacity --find workers --workload agents,rate=8 --slo-ttft 1",
    )
    add_options(capacity, CapacityOptions)
    capacity.set_defaults(execute=capacity_command.execute)


def _add_readers(commands: _Commands) -> None:
    """Add the commands that read what was recorded or measured."""
    replay = commands.add_parser(
        "replay",
        help="Makes the decisions of a recording again, and with other weights.",
        description="Makes every decision of a recording (select-service --record FILE) again, "
        "with the real code, out of what it met then; exit code 3 if one is another one now. With "
        "--weights it also shows what these would have chosen, one decision at a time: loads and "
        "caches stay as recorded. What would have become of those: select-sim run --trace FILE "
        "--format recording.",
        examples="select-sim replay recording --weights overlap_score_credit=0.5 --out replay.json",
    )
    replay.add_argument(
        "file",
        metavar="FILE",
        help="The file of --record. Its full predecessors are read first; FILE.000001 alone is a "
        "recording, too.",
    )
    add_flags(replay, SECTIONS["replay"])
    replay.set_defaults(execute=replay_command.execute)
    calibrate = commands.add_parser(
        "calibrate",
        help="Makes an engine's profile out of what was measured of it.",
        description="Fits the simulated engine's times to results of vLLM's bench, guidellm or "
        "AIPerf, or to a recording of the service, shows how well, and writes a profile for "
        "--engine profile=DIR and the planner. "
        "Runs should have few and many requests at a time, short and long prompts, and nothing "
        "in the prefix cache.",
        examples="select-sim calibrate vllm-c1.json vllm-c16.json vllm-c64.json "
        "--kv-tokens 396000 --out profile",
    )
    calibrate.add_argument(
        "files", nargs="+", metavar="FILE", help="Results as JSON, or the file of --record."
    )
    add_flags(calibrate, SECTIONS["calibrate"])
    calibrate.set_defaults(execute=calibrate_command.execute)


def _queue(args: argparse.Namespace) -> int:
    """Carry out operations on a queue."""
    command: CommandParser = args.parser
    try:
        text = read_section(QueueOptions, args).config
        settings = msgspec.json.decode(text.encode(), type=QueueSettings)
        lines = carry_out(settings, sys.stdin.buffer)
    except (msgspec.DecodeError, ValueError) as error:
        command.error(f"--config: {error}")
    return _line_by_line("queue", lines)


def _admit(args: argparse.Namespace) -> int:
    """Decide about arrivals."""
    command: CommandParser = args.parser
    try:
        asked = read_section(AdmitOptions, args)
        config = msgspec.json.decode(asked.config.encode(), type=dict[str, object])
        trial = PolicyTrial(asked.policy, config)
    except (msgspec.DecodeError, ValueError) as error:
        command.error(f"--config: {error}")
    return _line_by_line("admit", trial.decide(read_arrivals(sys.stdin.buffer)))


def _carry_out(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        code: int = args.execute(args)
        sys.stdout.flush()
    except (BadRecording, BadResult, BadTrace, NotWritten) as error:
        complain(f"{parser.prog}: {error}")
        return 1
    except KeyboardInterrupt:
        complain(f"{parser.prog}: stopped by Ctrl-C before it was done: there is no result")
        return INTERRUPTED
    except OSError as error:
        if error.errno is not None and error.filename is None:
            raise  # not about a named file: from standard output
        why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        parser.exit(2, f"{parser.prog}: error: {why}\n")
    except (msgspec.DecodeError, ValueError) as error:
        parser.error(str(error))
    return code


def _line_by_line(command: str, outcomes: Iterable[object]) -> int:
    """Write each outcome as soon as it is known."""
    encode = msgspec.json.Encoder().encode
    out = sys.stdout.buffer
    try:
        for outcome in outcomes:
            out.write(encode(outcome) + b"\n")
            out.flush()
    except BadTrace as error:
        out.flush()
        complain(f"select-sim {command}: {error}")
        return 1
    return 0
