"""Batches that are booked whole or not at all, and what is live of them."""

from __future__ import annotations

from typing import Any

from tests.live.replicas import Replica


def batch(name: str, samples: int) -> dict[str, Any]:
    """The body that books so many samples of one prompt, all or none."""
    item = {"reservation_id": name, "token_ids": [1] * 64, "n": samples}
    return {"requests": [item], "reserve": True, "atomic": True}


def booked(server: Replica) -> dict[str, int]:
    """How many reservations of each batch are live."""
    found: dict[str, int] = {}
    for one in server.view().booked:
        name = one.name.rpartition(".")[0]
        found[name] = found.get(name, 0) + 1
    return found
