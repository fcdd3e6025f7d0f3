"""The client: ask, book, tell, and let it retry, fail over, renew and tidy up.

`AsyncClient` and `Client` are the same for asyncio and for threads. Needs httpx and msgspec, and
xxhash where prompts are hashed here; nothing of the server.
"""

from __future__ import annotations

from select_service.client.asynchronous import AsyncClient
from select_service.client.core.options import Options
from select_service.client.core.problems import (
    BlockSizeUnknown,
    ClientClosed,
    ClientError,
    MissingPackage,
    NotAnAnswer,
    NotCached,
    TimedOut,
    Unreachable,
)
from select_service.client.hashing import hash_prompt
from select_service.client.reservation import Reservation
from select_service.client.synchronous import Client
from select_service.errors import ServiceError

__all__ = [
    "AsyncClient",
    "BlockSizeUnknown",
    "Client",
    "ClientClosed",
    "ClientError",
    "MissingPackage",
    "NotAnAnswer",
    "NotCached",
    "Options",
    "Reservation",
    "ServiceError",
    "TimedOut",
    "Unreachable",
    "hash_prompt",
]
