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
from select_service.standard_output import CommandParser

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_DAYS_MAX = 36_500
"""A century: dates end in the year 9999."""

_NEW_BEARER = "print a new token on stderr and its line for --token-file on stdout"
_NEW_PAIR = "write a new key pair to FILE (0600) and print the public key"


def main(arguments: Sequence[str]) -> int:
    """Run one of the two; return the exit code."""
    chosen = _parser().parse_args(arguments)
    return _new_token(chosen) if chosen.what == "token" else _new_keys(chosen)


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
        "sha256": digest,
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


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="select-service", allow_abbrev=False)
    kinds = parser.add_subparsers(dest="what", required=True)
    token = kinds.add_parser("token", help="bearer tokens")
    make = token.add_subparsers(dest="verb", required=True).add_parser(
        "new",
        help=_NEW_BEARER,
        description=f"{_NEW_BEARER[0].upper()}{_NEW_BEARER[1:]}.",
        allow_abbrev=False,
    )
    make.add_argument("--name", required=True, help="who will bear it")
    make.add_argument("--scopes", required=True, help=f"of {', '.join(SCOPES)}, with commas")
    make.add_argument(
        "--tenant", action="append", help="bind it to this tenant; may be given several times"
    )
    make.add_argument("--days", type=_days, help="how long it is good for")
    keys = kinds.add_parser("keys", help="key pairs for CURVE")
    pair = keys.add_subparsers(dest="verb", required=True).add_parser(
        "new",
        help=_NEW_PAIR,
        description=f"{_NEW_PAIR[0].upper()}{_NEW_PAIR[1:]}.",
        allow_abbrev=False,
    )
    pair.add_argument("file", metavar="FILE", help="for both keys; one that exists stays")
    return parser


def _days(text: str) -> float:
    days = float(text)
    if not 0 < days <= _DAYS_MAX:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {_DAYS_MAX}")
    return days
