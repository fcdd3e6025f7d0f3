"""`select-service doctor`: the findings of a running service, for people or as JSON.

Exit codes: 0 nothing of weight, 1 errors or warnings, 2 the service could not be asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from typing import TYPE_CHECKING, Final

import msgspec

from select_service.canaries import CannotLook
from select_service.client import AsyncClient
from select_service.client.connection_flags import add_connection_flags, client_of
from select_service.doctor.query import CannotAskError, ask
from select_service.doctor.report import format_report
from select_service.standard_output import complain, parse_command
from select_service.token_file import TokenUnreadable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from select_service.doctor.canary import CanaryReport
    from select_service.doctor.query import Answer
    from select_service.standard_output import Commands
    from select_service.types.doctor import Finding

PROBE_TIMEOUT_S: Final = 2.0
_HEALTHY, _ILL, _NO_ANSWER = 0, 1, 2
_WIDEST: Final = 100


def main(argv: Sequence[str]) -> int:
    """Query, print, and return the exit code."""
    try:
        return _examine(parse_command(add_commands, argv))
    except KeyboardInterrupt:  # the user has waited long enough
        return _NO_ANSWER


def _examine(arguments: argparse.Namespace) -> int:
    where = arguments.url if arguments.uds is None else arguments.uds
    try:
        answer = ask(arguments)
    except (CannotAskError, TokenUnreadable) as error:
        problem = str(error)
        complain(problem if problem.startswith(f"{where}: ") else f"{where}: {problem}")
        return _NO_ANSWER
    probed: CanaryReport | None = None
    found: list[Finding] = []
    if arguments.probe:
        from select_service.doctor.probe import probe  # starts threads: only if requested

        found = probe(answer.workers, min(arguments.timeout_s, PROBE_TIMEOUT_S))
        try:
            probed = asyncio.run(_send_canaries(arguments, answer))
        except CannotLook as error:
            complain(f"{where}: no canary prompts were sent, which takes the scope select: {error}")
        if probed is not None and probed.findings:
            found += probed.findings
            with contextlib.suppress(CannotAskError):  # it examines what the engines have reported
                answer = ask(arguments)
    findings = [*(answer.findings or []), *found]
    if arguments.json:
        report = {
            "ready": answer.ready,
            "waiting_for": answer.waiting_for,
            "findings": findings,
            "findings_left_out": answer.findings_left_out,
            "suspected": answer.suspected,
        }
        if probed is not None:
            report["canaries"] = {
                "ranks": probed.ranks,
                "asked": probed.asked,
                "agree": probed.agree,
            }
        print(msgspec.json.encode(report).decode())
    else:
        width = min(shutil.get_terminal_size().columns, _WIDEST)
        line = "" if probed is None else probed.text
        print(format_report(where, answer, findings, width, line), end="")
    is_ill = any(finding.severity != "info" for finding in findings)
    return _ILL if is_ill else _HEALTHY


async def _send_canaries(arguments: argparse.Namespace, answer: Answer) -> CanaryReport:
    from select_service.canaries import EVENTS_S
    from select_service.doctor.canary import send_canaries

    async with client_of(arguments, AsyncClient) as client:
        events_s = min(arguments.timeout_s, EVENTS_S)
        return await send_canaries(client, answer.workers, arguments.timeout_s, events_s)


def add_commands(commands: Commands) -> None:
    """Add the command of this module."""
    parser = commands.add_parser(
        "doctor",
        help="Says what is wired wrong in the fleet of a running service.",
        description="Asks a running service what is wired wrong in its fleet, and how to mend it. "
        "It examines the fleet at once. Exit codes: 0 nothing of weight, 1 errors or warnings, "
        "2 the service could not be asked.",
        examples="select-service doctor --url http://localhost:8092\n"
        "select-service doctor --probe --json",
    )
    add_connection_flags(parser, "File with a token that has the scope read.")
    parser.add_argument("--json", action="store_true", help="Print one line of JSON.")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="Also look whether the ports of all workers can be reached from here, and whether "
        "engines report a prompt as the service expects: each is sent up to four short prompts "
        "of made-up tokens, for one token of output.",
    )
