"""The flags of commands that ask a running service: where it is, and what it is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from select_service.client.asynchronous import AsyncClient
from select_service.client.core.options import Options
from select_service.client.synchronous import Client
from select_service.client.transport import DEFAULT_SELECTOR
from select_service.standard_output import positive_seconds
from select_service.token_file import read_token

if TYPE_CHECKING:
    import argparse

C = TypeVar("C", Client, AsyncClient)

_TIMEOUT_S: Final = 10.0


def add_connection_flags(parser: argparse.ArgumentParser, token: str) -> None:
    """Add them to a command; `token` is the help of `--token-file`."""
    parser.add_argument(
        "--url", default=DEFAULT_SELECTOR, help="URL of the service. Default: %(default)s."
    )
    parser.add_argument("--uds", metavar="PATH", help="Its Unix domain socket, instead of TCP.")
    parser.add_argument("--token-file", metavar="FILE", help=token)
    parser.add_argument("--ca", metavar="FILE", help="Certificates to trust with https.")
    parser.add_argument("--cert", metavar="FILE", help="A client certificate.")
    parser.add_argument("--key", metavar="FILE", help="Its key, unless it is in the same file.")
    parser.add_argument(
        "--timeout-s",
        type=positive_seconds,
        default=_TIMEOUT_S,
        metavar="S",
        help="Longest wait for an answer. Default: %(default)s.",
    )


def client_of(chosen: argparse.Namespace, kind: type[C], **options: Any) -> C:
    """Return a client of the service that the flags name, which asks once.

    Args:
        chosen: the flags.
        kind: for threads, or for asyncio.
        options: other options of the client.

    Raises:
        TokenUnreadable: `--token-file` has no token.
        ValueError: an address is invalid, or a file of the certificates cannot be used.
    """
    where = chosen.url if chosen.uds is None else f"unix:{chosen.uds}"
    token = None if chosen.token_file is None else read_token(chosen.token_file)
    cert = None if chosen.cert is None else (chosen.cert, chosen.key or chosen.cert)
    once = Options.single_attempt(chosen.timeout_s, **options)
    return kind(where, token=token, ca=chosen.ca, cert=cert, options=once)
