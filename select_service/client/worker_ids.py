"""Ids of workers that are replicas of Ray Serve, the same in every process that knows a replica."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

__all__ = ["reservation_id_of", "worker_id_of"]


@lru_cache(maxsize=16_384)
def worker_id_of(replica: str) -> int:
    """Return the 64-bit worker id of a replica by its unique id (`replica_tag` in its context).

    It is the one that Ray Serve LLM makes, so both may speak of the same worker.
    """
    return int.from_bytes(blake2b(replica.encode(), digest_size=8).digest(), "big")


def reservation_id_of(app: str, deployment: str, request: str) -> str:
    """Return under which id a request is booked.

    The router and the replica that serves the request know these three, so nothing has to be handed
    from one to the other.

    Args:
        app: application of the deployment.
        deployment: whose replica serves the request.
        request: Serve's internal id of it, which calls on behalf of one request share.
    """
    return f"{app}:{deployment}:{request}"
