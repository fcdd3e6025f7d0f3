"""The command line: `select-service [flags]` serves; `select-service demo` shows it at work.

Exit codes (contract 9): 0 ended by SIGINT or SIGTERM, 1 could not start, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from select_service.config import FLAGS, Flag, Settings, read_environment
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["main", "parse"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, or the service until it is told to stop; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        from select_service.demo import cli as demo  # noqa: PLC0415 - the service needs none of it

        return demo.main(arguments[1:])
    settings = parse(arguments, os.environ)
    from select_service.edge.app import serve  # noqa: PLC0415 - --help need not load a server

    return serve(settings)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Turn flags and environment into Settings; SystemExit(2) with a usage message otherwise."""
    parser = _parser()
    values = vars(parser.parse_args(argv))
    if values["replica_sync_peers"] and values["replica_sync_port"] is None:
        parser.error("--replica-sync-peers needs --replica-sync-port")
    return Settings(router=read_environment(environ), **values)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="select-service",
        description="Decides which LLM inference worker serves a request. "
        "Weights and switches come from DYN_* environment variables (README).",
        epilog="subcommands: demo (simulated engines and traffic; see select-service demo --help)",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"select-service {__version__}")
    for flag in FLAGS:
        _add(parser, flag)
    return parser


def _add(parser: argparse.ArgumentParser, flag: Flag) -> None:
    if flag.parse is None:
        parser.add_argument(flag.name, action="store_true", help=flag.help)
        return
    parser.add_argument(
        flag.name,
        type=_type(flag.parse),
        default=flag.default,
        metavar=flag.metavar,
        help=f"{flag.help} (default: {flag.default_text})",
    )


def _type(parse: Callable[[str], object]) -> Callable[[str], Any]:
    """Keep the text of a ValueError, which argparse would replace by a bare 'invalid value'."""

    def convert(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
