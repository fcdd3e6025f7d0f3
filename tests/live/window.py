"""The service with one more route, for tests: its ledger and its loads, seen at one instant.

`python -m tests.live.window …` takes the arguments of `python -m select_service` and is that
process in everything else. No client needs such a list, and a large one would hold the loop; a test
that asks what always holds needs both sides of the comparison from the same turn of the loop.
"""

from __future__ import annotations

import sys

from msgspec import Struct

from indexer.types import HASH_BYTES
from select_service import cli
from select_service.edge import asgi
from select_service.edge.codec import encode
from select_service.edge.http import ROUTES, Api, Request, Response
from select_service.edge.routing import Route
from select_service.types import ScopeLoads

WINDOW = "/test/ledger"
WATCHED = (sys.executable, "-m", "tests.live.window")


class Booked(Struct, frozen=True):
    """One reservation that is live here, as the ledger has it."""

    name: str
    worker_id: int
    dp_rank: int
    hashes: int
    prefill_tokens: int
    prefill_done: bool
    outputs: int


class View(Struct, frozen=True):
    """Everything a replica carries, and what it says that it carries."""

    booked: list[Booked]
    loads: list[ScopeLoads]


def look(api: Api, _: Request) -> Response:
    """List what is live, and the loads; fails with a 500 where the core breaks a promise."""
    core = api._service.core
    core.check()
    booked = [
        Booked(
            one.reservation_id,
            *rank,
            len(partition.ledger.chain_of(one)) // HASH_BYTES,
            one.prefill_tokens,
            one.prefill_done,
            one.output_blocks,
        )
        for partition in core.partitions.values()
        for rank, slot in partition.seats()
        for one in partition.ledger.reservations_on(slot)
    ]
    return Response(200, encode(View(booked, core.loads())))


def main() -> int:
    """Run the service with the window open."""
    route = Route("GET", WINDOW, look, None, View, 200, (), (), "", changes=False)
    vars(asgi)["ROUTES"] = (*ROUTES, route)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
