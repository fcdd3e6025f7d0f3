"""The client: select, book and report, with retries, failover, lease renewal and cleanup.

`AsyncClient` and `Client` offer the same for asyncio and for threads. Needs httpx and msgspec, and
xxhash if prompts are hashed locally; nothing of the server.
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
from select_service.client.reservation import PairReservation, Reservation, rank_headers
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
    "rank_headers",
]
