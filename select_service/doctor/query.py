"""Queries a running service with the SDK, over TCP or a Unix domain socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import UNSET, Struct, UnsetType

from select_service.client import (
    Client,
    ClientError,
    NotAnAnswer,
    ServiceError,
    Unreachable,
)
from select_service.client.connection_flags import client_of
from select_service.types.doctor import Finding

if TYPE_CHECKING:
    import argparse

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
    def reports_cache(self) -> bool:
        """Whether its engine reports its cache."""
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


def ask(chosen: argparse.Namespace) -> Answer:
    """Query the service that the flags name for its findings.

    Raises:
        CannotAskError: nothing answers, or something other than such a service.
        TokenUnreadable: `--token-file` has no token.
    """
    try:
        client = client_of(chosen, Client, answer_bytes_max=ANSWER_BYTES_MAX)
    except (ValueError, OSError) as error:
        raise CannotAskError(str(error).removeprefix(f"{chosen.url}: ")) from error
    with client:
        return _asked(client)


def _asked(client: Client) -> Answer:
    try:
        answer: Answer = client.call("GET", _PATH, kind=Answer, accepts=(_NOT_READY,))
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
        raise CannotAskError("the service reports no findings: it is older than this command")
    return answer
