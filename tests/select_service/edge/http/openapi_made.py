"""/openapi.json as a service has it, made in one go."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from select_service.edge.http.openapi import describing

if TYPE_CHECKING:
    from collections.abc import Iterator


def describe(overload_status: int = 503, *, with_tokens: bool = True) -> bytes:
    """The document of a service whose refusals for load have this status."""
    made = bytearray()

    def steps() -> Iterator[None]:
        made.extend((yield from describing(overload_status, with_tokens=with_tokens)))

    deque(steps(), maxlen=0)
    return bytes(made)
