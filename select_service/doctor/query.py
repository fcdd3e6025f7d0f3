"""Queries a running service with the SDK, over TCP or a Unix domain socket."""

from __future__ import annotations

import ssl
from typing import Final
from urllib.parse import urlsplit

from msgspec import UNSET, Struct, UnsetType

from select_service.client import (
    Client,
    ClientError,
    NotAnAnswer,
    Options,
    ServiceError,
    Unreachable,
)
from select_service.types.doctor import Finding

ANSWER_BYTES_MAX: Final = 256 << 20
"""Longest answer read: ten thousand workers take some ten megabytes."""

_PATH: Final = "/ready?verbose=true&examine=true"
_NEEDS_TOKEN: Final = (401, 403)
_NOT_READY: Final = 503  # with the same body as 200


class CannotAskError(Exception):
    """The service cannot be queried; the text says why."""


class ReachableWorker(Struct, frozen=True):
    """The parts of a worker's record that say where to reach it."""

    worker_id: int
    model_name: str = "default"
    tenant_id: str = "default"
    lifecycle: str = "schedulable"
    endpoint: str | None = None
    block_size: int | None = None
    data_parallel_start_rank: int | None = None
    data_parallel_size: int | None = None
    kv_events_endpoint: str | None = None
    kv_events_endpoints: dict[str, str] = {}
    replay_endpoint: str | None = None
    replay_endpoints: dict[str, str] = {}
    kv_events: str | None = None

    @property
    def tells(self) -> bool:
        """Whether its engine tells of its cache."""
        has_events = bool(self.kv_events_endpoint or self.kv_events_endpoints)
        return has_events and self.kv_events in (None, "engine")


class Answer(Struct, frozen=True):
    """The parts of GET /ready?verbose=true&examine=true needed here."""

    ready: bool
    schedulable_workers: int
    workers: list[ReachableWorker]
    waiting_for: list[str] = []
    findings: list[Finding] | UnsetType = UNSET
    findings_left_out: int = 0
    suspected: list[Finding] = []


def context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the context for https; None, the system's default, if nothing is given.

    Args:
        ca: file of certificates to trust instead of the system's.
        cert: file of a client certificate.
        key: file of its key, unless it is in the same one.

    Raises:
        CannotAskError: a file cannot be read, or is invalid.
    """
    if ca is None and cert is None:
        return None
    try:
        made = ssl.create_default_context(cafile=ca)
        if cert is not None:
            made.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        names = ", ".join(name for name in (ca, cert, key) if name is not None)
        raise CannotAskError(f"cannot use {names}: {error}") from error
    return made


def ask(
    url: str,
    uds: str | None,
    timeout_s: float,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Answer:
    """Query a service for its findings.

    Args:
        url: http or https; its path is prepended to the route's.
        uds: a Unix domain socket to connect to instead of the URL's host.
        timeout_s: longest wait for the whole answer.
        token: with the scope read, if the service requires one.
        tls: the context for https; None: the system's certificates are trusted.

    Raises:
        CannotAskError: nothing answers, or something other than such a service.
    """
    once = Options.single_attempt(timeout_s, answer_bytes_max=ANSWER_BYTES_MAX)
    try:
        address, prefix = address_of(url, uds)
        client = Client(address, token=token, ca=tls, options=once)
    except (ValueError, OSError) as error:
        raise CannotAskError(str(error).removeprefix(f"{url}: ")) from error
    with client:
        return _asked(client, prefix + _PATH)


def address_of(url: str, uds: str | None) -> tuple[str, str]:
    """Return what the SDK takes as the service's address, and what its paths begin with."""
    return (url, "") if uds is None else (f"unix:{uds}", urlsplit(url).path.rstrip("/"))


def _asked(client: Client, path: str) -> Answer:
    try:
        answer: Answer = client.call("GET", path, kind=Answer, accepts=(_NOT_READY,))
    except ServiceError as error:
        if error.status in _NEEDS_TOKEN:
            why = "it asks for a token that allows to read: --token-file"
        else:
            why = f"GET {_PATH} was answered with status {error.status}"
        raise CannotAskError(why) from error
    except NotAnAnswer as error:
        raise CannotAskError(f"what answers is no select-service: {error}") from error
    except Unreachable as error:
        raise CannotAskError(f"{error}\n{error.remedy}") from error
    except ClientError as error:
        raise CannotAskError(str(error)) from error
    if answer.findings is UNSET:
        raise CannotAskError("the service tells no findings: it is older than this command")
    return answer
