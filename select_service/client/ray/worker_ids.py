"""Worker ids of Ray Serve replicas, the same in every process that knows a replica.

`request_router.py` and `serve_worker.py` share it.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b


@lru_cache(maxsize=16_384)
def worker_id_of(replica: str) -> int:
    """Return the 64-bit worker id of a replica by its unique id (`replica_tag` in its context).

    It equals the id that Ray Serve LLM computes, so both may refer to the same worker.
    """
    return int.from_bytes(blake2b(replica.encode(), digest_size=8).digest(), "big")


def reservation_id_of(app: str, deployment: str, request: str) -> str:
    """Return the id under which a request is booked.

    The router and the replica that serves the request both know the three arguments, so nothing has
    to be passed from one to the other.

    Args:
        app: application of the deployment.
        deployment: the deployment whose replica serves the request.
        request: Serve's internal request id, shared by all calls on behalf of one request.
    """
    return f"{app}:{deployment}:{request}"
