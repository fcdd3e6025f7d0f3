"""`select-service doctor`: the findings of a running service, for people or as JSON.

Exit codes: 0 nothing of weight, 1 errors or warnings, 2 the service could not be asked.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from select_service.doctor.query import CannotAskError, ask, context
from select_service.doctor.report import tell
from select_service.standard_output import CommandParser, complain

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

URL: Final = "http://localhost:8092"
TIMEOUT_S: Final = 10.0
PROBE_TIMEOUT_S: Final = 2.0
_HEALTHY, _ILL, _NO_ANSWER = 0, 1, 2
_WIDEST: Final = 100


def main(argv: Sequence[str]) -> int:
    """Query, print, and return the exit code."""
    try:
        return _examine(_parser().parse_args(argv))
    except KeyboardInterrupt:  # the user has waited long enough
        return _NO_ANSWER


def _examine(arguments: argparse.Namespace) -> int:
    who = arguments.url if arguments.uds is None else arguments.uds
    try:
        token = None if arguments.token_file is None else _token_in(arguments.token_file)
        tls = context(arguments.ca, arguments.cert, arguments.key)
        answer = ask(arguments.url, arguments.uds, arguments.timeout_s, token, tls)
    except CannotAskError as error:
        complain(f"{who}: {error}")
        return _NO_ANSWER
    findings = list(answer.findings or [])
    if arguments.probe:
        from select_service.doctor.probe import probe  # starts threads: only if requested

        findings += probe(answer.workers, min(arguments.timeout_s, PROBE_TIMEOUT_S))
    if arguments.json:
        told = {
            "ready": answer.ready,
            "waiting_for": answer.waiting_for,
            "findings": findings,
            "findings_left_out": answer.findings_left_out,
        }
        print(msgspec.json.encode(told).decode())
    else:
        width = min(shutil.get_terminal_size().columns, _WIDEST)
        print(tell(who, answer, findings, width), end="")
    is_ill = any(finding.severity != "info" for finding in findings)
    return _ILL if is_ill else _HEALTHY


def _token_in(path: str) -> str:
    """Read a token from a file: on a command line everybody on the machine could see it."""
    try:
        token = Path(path).read_text("ascii").strip()
    except (OSError, ValueError) as error:
        raise CannotAskError(f"cannot read {path}") from error
    if not token.isprintable():
        raise CannotAskError(f"{path} has more than a token")
    return token


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="select-service doctor",
        description="Asks a running service what is wired wrong in its fleet. Exit codes: 0 "
        "nothing of weight, 1 errors or warnings, 2 the service could not be asked.",
        allow_abbrev=False,
    )
    parser.add_argument("--url", default=URL, help="of the service (default: %(default)s)")
    parser.add_argument("--uds", metavar="PATH", help="its Unix domain socket, instead of TCP")
    parser.add_argument("--token-file", metavar="FILE", help="has a token with the scope read")
    parser.add_argument("--ca", metavar="FILE", help="certificates to trust with https")
    parser.add_argument("--cert", metavar="FILE", help="a client certificate")
    parser.add_argument("--key", metavar="FILE", help="its key, unless it is in the same file")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="also look whether the ports of all workers can be reached from here",
    )
    parser.add_argument(
        "--timeout-s",
        type=_seconds,
        default=TIMEOUT_S,
        metavar="S",
        help="longest wait for an answer (default: %(default)s)",
    )
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value
