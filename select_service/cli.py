"""The command line: `select-service [flags]` serves; `demo` shows it at work, `doctor` examines it.

Exit codes: 0 ended by SIGINT or SIGTERM, 1 could not start, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from select_service import NOT_OF_THE_CLIENT
from select_service.settings import (
    FLAGS,
    SECTIONS,
    ConfigError,
    Layers,
    Settings,
    read_environment,
)
from select_service.settings.command_line import add_flags
from select_service.settings.layers import read_file
from select_service.standard_output import CommandParser, complain, printing, redact_tracebacks
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["main", "parse"]


_DESCRIPTION = """\
Decides which LLM inference worker serves a request. Without a command: serves. Weights and switches
come from DYN_* environment variables. deploy/reference/flags.md lists the flags as a page.

commands:
  demo                   see it at work: simulated engines with their own traffic
  doctor                 what is wired wrong with a running service, and what to do about it
  workers, loads, drain, explain, call
                         query or change a running service
  leave                  announce that a running service will stop
  token new, keys new    make credentials

select-service COMMAND --help says more about each. Below are the flags of the service, by subject.
"""
_CLIENT_COMMANDS = ("call", "workers", "loads", "drain", "explain")
_NEEDS = {
    "tls_key": "tls_cert",
    "tls_client_ca": "tls_cert",
    "curve_replica_keys": "curve_key",
    "side_host": "side_port",
    "epp_host": "epp_port",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, or the service until it is told to stop; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    redact_tracebacks()
    try:
        run = _chosen(arguments)
    except ModuleNotFoundError as error:
        needed = error.name or ""
        if needed.partition(".")[0] in {"select_service", "indexer"}:
            raise
        text = f"select-service: this needs {needed}, {NOT_OF_THE_CLIENT}"
        complain(text)
        return 1
    return run()


def _chosen(arguments: list[str]) -> Callable[[], int]:
    """Load what is asked for, and return what runs it."""
    if arguments[:1] == ["demo"]:
        from select_service.demo import cli as demo  # the service needs none of it

        return partial(demo.main, arguments[1:])
    if arguments[:1] in (["token"], ["keys"]):
        from select_service.edge.security import credentials_cli

        return _printing(partial(credentials_cli.main, arguments), arguments)
    if arguments[:1] == ["leave"]:
        from select_service.edge import leave_command

        return partial(leave_command.main, arguments[1:])
    if arguments[:1] == ["doctor"]:
        from select_service.doctor import cli as doctor

        return _printing(partial(doctor.main, arguments[1:]), arguments)
    if arguments[:1] and arguments[0] in _CLIENT_COMMANDS:
        from select_service.client import cli as client

        return _printing(partial(client.main, arguments), arguments)
    # modules are no garbage; `edge/garbage_collection.py` decides when the service is up
    gc.disable()
    # numpy brings OpenBLAS, which at once starts a thread per core that spins for work: 100 ms of
    # processor time beside our start, for products of matrices that nobody here asks for
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    settings, layers = read(arguments, os.environ)
    from select_service.edge.app import serve  # --help need not load a server

    return partial(serve, settings, layers)


def _printing(run: Callable[[], int], arguments: list[str]) -> Callable[[], int]:
    return partial(printing, run, f"select-service {arguments[0]}", unread=2)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Turn flags and environment into Settings; SystemExit(2) with a usage message otherwise."""
    return read(argv, environ)[0]


def read(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Settings, Layers]:
    """The same, with who said what."""
    parser = _parser()
    known, strange = parser.parse_known_args(argv)
    if strange:
        parser.error(_what_is(strange[0]))
    given = vars(known)
    warnings: list[str] = []
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        given["tracing"] = "none"
    env = _said_by(environ, warnings)
    from select_service.edge.config_reload import check_settings  # numpy; see `main`

    try:
        file = {} if given.get("config") is None else read_file(given["config"])
        layers = Layers(read_environment(environ), env=env, file=file, flags=given)
        settings = layers.settings()
        warnings += check_settings(settings)
    except ConfigError as error:
        parser.error(str(error))
    _check_entrances(parser, layers, settings)
    if warnings:
        router = layers.router
        layers.router = replace(router, warnings=(*router.warnings, *warnings))
        settings = replace(settings, router=layers.router)
    return settings, layers


def _what_is(strange: str) -> str:
    """Say that nobody knows an argument, and what may have been meant."""
    from difflib import get_close_matches  # a service that starts needs none

    name = strange.partition("=")[0]
    commands = ("demo", "doctor", "leave", "token", "keys", *_CLIENT_COMMANDS)
    known = [*(flag.name for flag in FLAGS), *commands]
    near = get_close_matches(name, known, n=1)
    return f"unknown argument: {strange}" + (f" (is {near[0]} meant?)" if near else "")


def _said_by(environ: Mapping[str, str], warnings: list[str]) -> dict[str, object]:
    """Return what variables say in the place of flags; one that cannot be read leaves a warning."""
    said: dict[str, object] = {}
    for flag in FLAGS:
        text = environ.get(flag.type.env) if flag.type.env else None
        if not text or flag.type.parse is None:
            continue
        try:
            said[flag.field] = flag.type.parse(text)
        except ValueError as error:
            warnings.append(f"{flag.type.env}: {error}; ignored")
    return said


def _check_entrances(parser: argparse.ArgumentParser, layers: Layers, settings: Settings) -> None:
    """With a Unix socket there is TCP only if it is asked for; what needs TCP asks for it."""
    if settings.side_port is not None and settings.side_port == settings.port != 0:
        parser.error("--side-port must not be --port: they lead to different things")
    if settings.epp_port and settings.epp_port in (settings.port, settings.side_port):
        parser.error("--epp-port must not be --port or --side-port: it speaks gRPC")
    if settings.replica_sync_peers and settings.replica_sync_port is None:
        parser.error("--replica-sync-peers needs --replica-sync-port")
    for field, needed in _NEEDS.items():
        if getattr(settings, field) is not None and getattr(settings, needed) is None:
            parser.error(f"--{field} needs --{needed}".replace("_", "-"))
    if settings.port is not None:
        return
    if layers.source_of("host") != "default":
        parser.error("--host with --uds needs --port")
    is_reached = settings.side_port is not None or settings.advertise_url is not None
    if settings.replica_sync_port is not None and not is_reached:
        parser.error(
            "--replica-sync-port with --uds needs --side-port or --port: replicas fetch over TCP"
        )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="select-service",
        # with two hundred flags the generated one would bury the error that follows it
        usage="%(prog)s [--FLAG VALUE ...], %(prog)s COMMAND ... (--help: all of them)",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"select-service {__version__}")
    for name, section in SECTIONS.items():
        add_flags(parser.add_argument_group(name), section)
    return parser
