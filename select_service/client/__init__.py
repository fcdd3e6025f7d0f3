"""The client: ask, book, tell, and let it retry, fail over, renew and tidy up.

`AsyncClient` and `Client` are the same for asyncio and for threads. Needs httpx and msgspec, and
xxhash where prompts are hashed here; nothing of the server.
"""

from __future__ import annotations

from select_service.client.asynchronous import AsyncClient
from select_service.client.core.options import Options
from select_service.client.core.problems import (
    AnswerTooLarge,
    BlockSizeUnknown,
    ClientClosed,
    ClientError,
    ForkedClient,
    MissingPackage,
    NotAnAnswer,
    NotCached,
    OtherLoop,
    TimedOut,
    Unreachable,
)
from select_service.client.hashing import hash_prompt
from select_service.client.reservation import PairReservation, Reservation
from select_service.client.synchronous import Client
from select_service.errors import ServiceError

__all__ = [
    "AnswerTooLarge",
    "AsyncClient",
    "BlockSizeUnknown",
    "Client",
    "ClientClosed",
    "ClientError",
    "ForkedClient",
    "MissingPackage",
    "NotAnAnswer",
    "NotCached",
    "Options",
    "OtherLoop",
    "PairReservation",
    "Reservation",
    "ServiceError",
    "TimedOut",
    "Unreachable",
    "hash_prompt",
]
