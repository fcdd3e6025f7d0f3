"""`select-service token new` and `keys new`: create credentials, and show them once."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec

from indexer.edge.curve import new_key_file
from indexer.errors import KeyFileUnusable
from select_service.edge.security.tokens import SCOPES, TokenRecord, new_token
from select_service.standard_output import parse_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.standard_output import Commands

_DAYS_MAX = 36_500
"""A century: dates end in the year 9999."""


def main(arguments: Sequence[str]) -> int:
    """Run one of the two; return the exit code."""
    chosen = parse_command(add_commands, arguments)
    return _new_token(chosen) if chosen.command == "token" else _new_keys(chosen)


def _new_token(chosen: argparse.Namespace) -> int:
    """Print a new token on stderr, and its line for the token file on stdout."""
    unknown = [scope for scope in chosen.scopes.split(",") if scope not in SCOPES]
    if unknown:
        text = f"--scopes: {unknown[0]!r} is none of {', '.join(SCOPES)}"
        sys.stderr.write(f"select-service token new: {text}\n")
        return 2
    token, digest = new_token()
    expires = None
    if chosen.days is not None:
        expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=chosen.days)
    fields = {
        "name": chosen.name,
        "sha256": None if chosen.with_token else digest,
        "token": token if chosen.with_token else None,
        "scopes": chosen.scopes.split(","),
        "tenants": chosen.tenant or None,
        "expires": None if expires is None else expires.isoformat(),
    }
    try:
        record = msgspec.convert({k: v for k, v in fields.items() if v is not None}, TokenRecord)
    except msgspec.ValidationError as error:
        sys.stderr.write(f"select-service token new: {error}\n")
        return 2
    sys.stderr.write(f"token, shown only now: {token}\n")
    sys.stdout.write(msgspec.json.encode(record).decode() + "\n")
    return 0


def _new_keys(chosen: argparse.Namespace) -> int:
    """Write a key pair to a file, and print its public half."""
    try:
        keys = new_key_file(chosen.file)
    except KeyFileUnusable as error:
        sys.stderr.write(f"select-service keys new: {error}\n")
        return 1
    sys.stdout.write(keys.public + "\n")
    return 0


def add_commands(commands: Commands) -> None:
    """Add the commands of this module."""
    token = commands.add_parser(
        "token", help="Makes bearer tokens.", description="Makes bearer tokens."
    )
    text = "Prints a new token on standard error, and its line for --token-file on standard output."
    make = token.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "new",
        help=text,
        description=text,
        examples="select-service token new --name gateway --scopes select,lifecycle >> tokens",
    )
    make.add_argument("--name", required=True, help="Name of its bearer.")
    make.add_argument(
        "--scopes", required=True, help=f"What it allows: some of {', '.join(SCOPES)}, with commas."
    )
    make.add_argument(
        "--tenant",
        action="append",
        help="Bind it to this tenant; may be given several times.",
    )
    make.add_argument(
        "--with-token",
        action="store_true",
        help="Put the token itself into the line instead of its hash: one file then serves the "
        "service and its clients, as --token-file of both.",
    )
    make.add_argument("--days", type=_days, help="How many days it is good for. Default: for ever.")
    keys = commands.add_parser(
        "keys",
        help="Makes key pairs that encrypt what replicas send each other (CURVE).",
        description="Makes key pairs that encrypt what replicas send each other (CURVE).",
    )
    text = "Writes a new key pair to a file of mode 0600, and prints the public key."
    pair = keys.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "new", help=text, description=text, examples="select-service keys new replica.key"
    )
    pair.add_argument("file", metavar="FILE", help="File for both keys; one that exists stays.")


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days <= _DAYS_MAX:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {_DAYS_MAX}")
    return days
