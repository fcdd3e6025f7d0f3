"""The command line: `select-service [flags]` serves; `demo` shows it at work, `doctor` examines it.

Exit codes (contract 9): 0 ended by SIGINT or SIGTERM, 1 could not start, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from select_service.config import FLAGS, Flag, Settings, read_environment
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["main", "parse"]


_NEEDS = {
    "tls_key": "tls_cert",
    "tls_client_ca": "tls_cert",
    "curve_replica_keys": "curve_key",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, or the service until it is told to stop; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        from select_service.demo import cli as demo  # noqa: PLC0415 - the service needs none of it

        return demo.main(arguments[1:])
    if arguments[:1] in (["token"], ["keys"]):
        from select_service.edge import credentials_cli  # noqa: PLC0415 - as above

        return credentials_cli.main(arguments)
    if arguments[:1] == ["doctor"]:
        from select_service.doctor import cli as doctor  # noqa: PLC0415 - as above

        return doctor.main(arguments[1:])
    gc.disable()  # modules are no garbage; `edge/garbage.py` decides when the service is up
    # numpy brings OpenBLAS, which at once starts a thread per core that spins for work: 100 ms of
    # processor time beside our start, for products of matrices that nobody here asks for
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    settings = parse(arguments, os.environ)
    from select_service.edge.app import serve  # noqa: PLC0415 - --help need not load a server

    return serve(settings)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Turn flags and environment into Settings; SystemExit(2) with a usage message otherwise."""
    warnings: list[str] = []
    parser = _parser(environ, warnings)
    values = vars(parser.parse_args(argv))
    if values["replica_sync_peers"] and values["replica_sync_port"] is None:
        parser.error("--replica-sync-peers needs --replica-sync-port")
    _check_entrances(parser, argv, values)
    for flag, needed in _NEEDS.items():
        if values[flag] is not None and values[needed] is None:
            parser.error(f"--{flag} needs --{needed}".replace("_", "-"))
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        values["tracing"] = "none"
    router = read_environment(environ)
    settings = Settings(router=router, **values)
    from select_service.core.admitting import check_admission  # noqa: PLC0415 - numpy; see `main`

    try:
        has_idle_thresholds = check_admission(settings.admission)
        settings.trust.check()
    except ValueError as error:
        parser.error(str(error))
    if has_idle_thresholds:
        warnings.append("busy thresholds have no effect while --admission-control is none")
    if not warnings:
        return settings
    return replace(settings, router=replace(router, warnings=(*router.warnings, *warnings)))


def _check_entrances(
    parser: argparse.ArgumentParser, argv: Sequence[str], values: dict[str, Any]
) -> None:
    """With a Unix socket there is TCP only if it is asked for."""
    if values["uds"] is None or _has(argv, "--port"):
        return
    values["port"] = None
    if _has(argv, "--host"):
        parser.error("--host with --uds needs --port")
    if values["replica_sync_port"] is not None and values["advertise_url"] is None:
        parser.error("--replica-sync-port with --uds needs --port: replicas fetch over TCP")


def _has(argv: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in argv)


def _parser(environ: Mapping[str, str], warnings: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="select-service",
        description="Decides which LLM inference worker serves a request. "
        "Weights and switches come from DYN_* environment variables (README).",
        epilog="subcommands: demo (simulated engines and traffic), doctor (what is wired wrong "
        "with a running service), token new, keys new (credentials); see select-service demo "
        "--help and so on",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"select-service {__version__}")
    for flag in FLAGS:
        _add(parser, flag, _default(flag, environ, warnings))
    return parser


def _default(flag: Flag, environ: Mapping[str, str], warnings: list[str]) -> object:
    """Return what holds without the flag; a variable that cannot be read leaves a warning."""
    text = environ.get(flag.env) if flag.env else None
    if not text or flag.parse is None:
        return flag.default
    try:
        return flag.parse(text)
    except ValueError as error:
        warnings.append(f"{flag.env}: {error}; ignored")
        return flag.default


def _add(parser: argparse.ArgumentParser, flag: Flag, default: object) -> None:
    if flag.parse is None:
        parser.add_argument(flag.name, action="store_true", help=flag.help)
        return
    parser.add_argument(
        flag.name,
        type=_type(flag.parse),
        default=default,
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
