"""The service with two more routes, for tests: ledger and loads of one instant, and garbage.

`python -m tests.live.window …` takes the arguments of `python -m select_service` and is that
process in everything else. No client needs such a list, and a large one would hold the loop; a test
that asks what always holds needs both sides of the comparison from the same turn of the loop.
"""

from __future__ import annotations

import asyncio
import gc
import sys

from msgspec import Struct

from indexer.types import HASH_BYTES
from select_service import cli
from select_service.edge.codec.encoder import encode
from select_service.edge.codec.responses import Response
from select_service.edge.http import application
from select_service.edge.http.api import Api, Request
from select_service.edge.http.routes import ROUTES
from select_service.edge.routing import Route
from select_service.types import ScopeLoads

WINDOW = "/test/ledger"
BIN = "/test/garbage"
TASKS = "/test/tasks"
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
    core = api.service.core
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
        for rank, slot in partition.fleet_slots.ranks_and_slots()
        for one in partition.ledger.reservations_on(slot)
    ]
    return Response(200, encode(View(booked, core.queries.loads())))


class Garbage(Struct, frozen=True):
    """What nobody would have collected, and how many objects are out of the collector's way."""

    found: int
    frozen: int
    blocks: int  # of memory that Python's objects take, by the word of its allocator


def empty_bin(_: Api, __: Request) -> Response:
    """Count what was frozen alive and has become a cycle since; all of it goes now."""
    gc.collect()
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    found = gc.collect()
    gc.freeze()
    return Response(200, encode(Garbage(found, frozen, sys.getallocatedblocks())))


class Tasks(Struct, frozen=True):
    """What is under way on the loop."""

    count: int


def count_tasks(_: Api, __: Request) -> Response:
    """Count them, this one left out."""
    return Response(200, encode(Tasks(len(asyncio.all_tasks()) - 1)))


def main() -> int:
    """Run the service with the windows open."""
    vars(application)["ROUTES"] = (
        *ROUTES,
        Route("GET", WINDOW, look, None, View),
        Route("GET", BIN, empty_bin, None, Garbage),
        Route("GET", TASKS, count_tasks, None, Tasks),
    )
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
