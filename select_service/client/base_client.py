"""What the two clients have in common: the session, its upkeep, addresses, and a clock.

`asynchronous.py` and `synchronous.py` build on it; the core in `core` does not know it.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import uuid
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

from select_service.client.core.options import Options
from select_service.client.core.problems import ForkedClient
from select_service.client.core.session import ClientSession
from select_service.client.core.upkeep import SessionUpkeep
from select_service.client.hashing import hash_prompt
from select_service.client.transport import SelectorEndpoints

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from select_service.client.core.booking import ClientBooking
    from select_service.client.core.exchange import Run

_log = logging.getLogger("select_service.client")

Book: TypeAlias = "Callable[[dict[str, Any], str, float, float | None], Run[ClientBooking]]"
"""A verb of the session that books: body, id, now, timeout in seconds."""


class BaseClient:
    """The part of a client that does not depend on how it waits."""

    def __init__(
        self,
        selectors: Sequence[str],
        token: str | Callable[[], str] | None,
        ca: str | ssl.SSLContext | None,
        cert: tuple[str, str] | None,
        owner: str | None,
        options: Options | None,
    ) -> None:
        options = Options() if options is None else options
        self._lock = threading.RLock()
        self._endpoints = SelectorEndpoints(selectors, options, token=token, ca=ca, cert=cert)
        self._session = ClientSession(
            self._endpoints.names,
            options,
            owner=f"{socket.gethostname()}:{os.getpid()}" if owner is None else owner,
            rng=random.Random(),
            new_id=_new_id,
            hash_prompt=hash_prompt,
            on_work=self._on_work,
        )
        self._upkeep = SessionUpkeep(self._session)
        self._process: int | None = None  # the process it is in use in

    @property
    def selector(self) -> str:
        """The selector currently in use."""
        return self._endpoints.names[self._session.selectors.current]

    @property
    def degraded(self) -> bool:
        """Whether no selector can be reached: reservations are choices from the last catalog."""
        return self._session.selectors.is_down

    def stats(self) -> dict[str, int]:
        """Return counters since the client was created: requests, retries, failovers and so on."""
        return self._session.stats.as_dict()

    def _is_forked(self) -> bool:
        """Tell whether another process uses it, and owns its thread or loop, sockets and leases."""
        here = os.getpid()
        if self._process is None:
            self._process = here
        return self._process != here

    def _refuse_forked(self) -> None:
        """Refuse to use connections that another process reads from, too.

        Raises:
            ForkedClient: it was used before this process was forked.
        """
        if self._is_forked():
            raise ForkedClient(
                f"the client is at work in process {self._process}, of which this one is a fork: "
                "make one here (a client that was not used before the fork may be used after it)"
            )

    def _stumbled(self) -> None:
        """Continue after an unexpected error: bookings must still be renewed and freed."""
        _log.exception("what runs beside the calls of a client has met an error; it goes on")
        with self._lock:
            self._session.stats.upkeep_errors += 1
            self._upkeep.pause(monotonic())

    def _on_work(self) -> None:
        raise NotImplementedError


def seconds(milliseconds: float | None) -> float | None:
    """Convert a call's timeout to the core's unit."""
    return None if milliseconds is None else milliseconds / 1e3


def _new_id() -> str:
    return str(uuid.uuid4())
