"""The command line: `select-service [flags]` serves; `demo` shows it at work, `doctor` examines it.

Exit codes: 0 ended by SIGINT or SIGTERM, 1 could not start, 2 wrong usage,
130 interrupted before it served (by the signal itself while it was loaded).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shlex
import sys
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from select_service import NOT_OF_THE_CLIENT, interrupts
from select_service.settings import (
    ENVIRONMENT,
    FLAGS,
    SECTIONS,
    ConfigError,
    Layers,
    Settings,
    read_environment,
)
from select_service.settings.command_line import add_flags
from select_service.settings.layers import read_file
from select_service.standard_output import (
    CommandParser,
    complain,
    definitions,
    meant,
    parse_command,
    printing,
    redact_tracebacks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from select_service.standard_output import Commands

_DESCRIPTION = """\
Decides which LLM inference worker serves a request, as a service over HTTP.
`select-service COMMAND --help` says more about a command.

commands:
{commands}"""
_EXAMPLES = """\
select-service --config settings.yaml --state-dir /var/lib/select-service
select-service doctor --url http://localhost:8092"""
_COMMANDS: Final = {
    "demo": "Show the service at work, with simulated engines and traffic.",
    "doctor": "Say what is wired wrong with a service, and how to mend it.",
    "workers": "List the workers of a running service.",
    "loads": "List the load of every rank.",
    "explain": "Explain the last decisions, or one of them.",
    "drain": "Send a worker nothing new, so that it can be stopped.",
    "call": "Send one request to any route.",
    "leave": "Tell the service on this machine that it will have to go.",
    "token": "Make a bearer token (token new).",  # nosec B105 - a help text
    "keys": "Make a key pair for traffic between replicas (keys new).",
    "completion": "Print a script that completes commands and flags in a shell.",
}
_INTERRUPTED: Final = 130
_AS_NEAR: Final = 0.7  # `serve` is no `leave`
_PROGRAMS: Final = ("select-service", "select-sim", "select-planner")
_MORE_VARIABLES: Final = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "where --tracing otlp sends traces, and others of that name",
    "OTEL_SDK_DISABLED": "true: as --tracing none",
    "SELECT_SERVICE_PURE": "1: plain Python instead of the compiled kernels",
}
_NEEDS = {
    "tls_key": "tls_cert",
    "tls_client_ca": "tls_cert",
    "curve_replica_keys": "curve_key",
    "side_host": "side_port",
    "epp_host": "epp_port",
}
_IDLE_WITHOUT = {
    "sessions_max": "session_ttl_s",
    "session_gap_factor": "session_ttl_s",
    "kv_pull_costs": "kv_pull",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, or the service until it is stopped; returns the exit code."""
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
    try:
        interrupts.raise_again()
        return run()
    except KeyboardInterrupt:  # before there was anything to end in order, or a second time
        complain("select-service: interrupted")
        return _INTERRUPTED


def _chosen(arguments: list[str]) -> Callable[[], int]:
    """Load what is asked for, and return what runs it."""
    if arguments[:1] == ["demo"]:
        from select_service.demo import cli as demo  # the service needs none of it

        return partial(demo.main, arguments)
    if arguments[:1] == ["leave"]:
        from select_service.edge import leave_command

        return partial(leave_command.main, arguments)
    if arguments[:1] and arguments[0] in _COMMANDS:
        return partial(printing, _asking(arguments), f"select-service {arguments[0]}", unread=2)
    # modules are no garbage; `edge/garbage_collection.py` decides when the service is up
    gc.disable()
    # numpy brings OpenBLAS, which at once starts a thread per core that spins for work: 100 ms of
    # processor time beside our start, for products of matrices that are not needed here
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    settings, layers = read(arguments, os.environ)
    from select_service.edge.app import serve  # --help need not load a server

    return partial(serve, settings, layers)


def _asking(arguments: list[str]) -> Callable[[], int]:
    """Load the command of those whose answers may be read in part."""
    if arguments[0] == "completion":
        return partial(_complete, arguments)
    if arguments[0] in ("token", "keys"):
        from select_service.edge.security import credentials_cli

        return partial(credentials_cli.main, arguments)
    if arguments[0] == "doctor":
        from select_service.doctor import cli as doctor

        return partial(doctor.main, arguments)
    from select_service.client import cli as client

    return partial(client.main, arguments)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Turn flags and environment into Settings; SystemExit(2) with a usage message otherwise."""
    return read(argv, environ)[0]


def read(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Settings, Layers]:
    """The same, with the source of each."""
    parser = service_parser(by_subject="--help-all" in argv)
    known, strange = parser.parse_known_args(argv)
    if strange:
        parser.error(_what_is(strange, argv))
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
        warnings += [
            f"{field} has no effect without {switch}"
            for field, switch in _IDLE_WITHOUT.items()
            if layers.source_of(field) != "default" and not getattr(settings, switch)
        ]
    except ConfigError as error:
        parser.error(str(error))
    _check_entrances(parser, layers, settings)
    if warnings:
        router = layers.router
        layers.router = replace(router, warnings=(*router.warnings, *warnings))
        settings = replace(settings, router=layers.router)
    return settings, layers


def _what_is(strange: list[str], argv: Sequence[str]) -> str:
    """Say that the first of these arguments is unknown, and what may have been meant."""
    command = next((one for one in strange if one in _COMMANDS), None)
    if command is not None:
        others = list(argv)
        others.remove(command)
        return f"a command comes first: {shlex.join(['select-service', command, *others])}"
    name = strange[0].partition("=")[0]
    if name.startswith("-"):
        return f"unknown argument: {strange[0]}{meant(name, [flag.name for flag in FLAGS])}"
    near = meant(name, [*_COMMANDS, "--help", "--version"], _AS_NEAR)
    usage = f"; commands: {', '.join(_COMMANDS)}; without one the service starts"
    return f"unknown argument: {strange[0]}{near or usage}"


def _said_by(environ: Mapping[str, str], warnings: list[str]) -> dict[str, object]:
    """Return what variables say in the place of flags; one that cannot be read leaves a warning."""
    values: dict[str, object] = {}
    for flag in FLAGS:
        text = environ.get(flag.type.env) if flag.type.env else None
        if not text or flag.type.parse is None:
            continue
        try:
            values[flag.field] = flag.type.parse(text)
        except ValueError as error:
            warnings.append(f"{flag.type.env}: {error}; ignored")
    return values


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


# -- help ----------------------------------------------------------------------------------------


def service_parser(*, by_subject: bool = False) -> CommandParser:
    """Return the parser of the service's own flags.

    Args:
        by_subject: whether its help has them in the sections of the reference, instead of those
            that many people need at the beginning.
    """
    width = max(map(len, _COMMANDS))
    listed = "\n".join(f"  {name:{width}}  {text}" for name, text in _COMMANDS.items())
    parser = CommandParser(
        prog="select-service",
        usage="%(prog)s [FLAG ...], or %(prog)s COMMAND [FLAG ...]",
        description=_DESCRIPTION.format(commands=listed),
        examples=_EXAMPLES,
    )
    parser.list_seldom_used(_below_all_flags() if by_subject else "")
    common = [flag for flag in FLAGS if flag.type.is_common]
    by_use = {"common flags": common, "other flags": [one for one in FLAGS if one not in common]}
    for name, flags in (SECTIONS if by_subject else by_use).items():
        add_flags(parser.add_argument_group(name), flags, brief=True)
    return parser


def _below_all_flags() -> str:
    """List what each admission policy does, and the variables that no flag names."""
    from select_service.core.admission.policies import MEANINGS  # numpy, only for this help

    variables = {one.name: one.help for one in ENVIRONMENT} | _MORE_VARIABLES
    return (
        f"{definitions('admission policies', MEANINGS)}\n\n{definitions('environment', variables)}"
    )


# -- completion ----------------------------------------------------------------------------------


def _complete(arguments: list[str]) -> int:
    """Print a completion script; shtab makes it from the parsers."""
    shells: list[str] = []  # without shtab none is completed, but --help helps
    with contextlib.suppress(ImportError):
        import shtab

        shells = [*shtab.SUPPORTED_SHELLS]

    def add(commands: Commands) -> None:
        made = commands.add_parser(
            "completion",
            help=_COMMANDS["completion"],
            description="Prints a script for a shell, which completes commands and flags.",
            examples="select-service completion bash > "
            "~/.local/share/bash-completion/completions/select-service",
        )
        made.add_argument("shell", choices=shells or None, help="The shell, e.g. bash.")
        made.add_argument(
            "--program",
            choices=_PROGRAMS,
            default=_PROGRAMS[0],
            help="What is completed. Default: %(default)s.",
        )

    chosen = parse_command(add, arguments)
    if not shells:
        complain("completion needs shtab: pip install 'shtab>=1.7'")
        return 1
    parser = _whole_parser(chosen.program, add)
    print(shtab.complete(parser, chosen.shell))
    return 0


def _whole_parser(program: str, completion: Callable[[Commands], None]) -> CommandParser:
    """Return a parser with all commands of a program."""
    if program == "select-sim":
        from select_service.simulator import cli as simulator

        return simulator.parser()
    if program == "select-planner":
        from select_service.planner import cli as planner

        return planner.parser()
    from select_service.client import cli as client
    from select_service.demo import cli as demo
    from select_service.doctor import cli as doctor
    from select_service.edge import leave_command
    from select_service.edge.security import credentials_cli

    parser = service_parser()
    commands = parser.add_subparsers(metavar="COMMAND")
    for one in (demo, doctor, client, leave_command, credentials_cli):
        one.add_commands(commands)
    completion(commands)
    return parser
