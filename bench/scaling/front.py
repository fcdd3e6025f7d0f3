"""`python -m bench.scaling.front`: what a request costs that goes through a process in front.

The front is the cheapest there can be: it hands bytes on in both directions and looks at none of
them. One that finds out whose a request is (the model is in the body, the owner of a reservation in
no path) costs more. Printed are the CPU µs of the service alone, and of front and service.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, cast

import uvloop
from typing_extensions import override

from bench.compare.servers import OURS, RunningServer, contenders
from bench.compare.target import Target
from bench.compare.workloads import selections
from bench.load.events import Publishers
from bench.load.http import drive
from bench.output import raise_descriptor_limit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_WORKERS = 16
_RING = 64
_READY = "listening on "


class _Half(asyncio.Protocol):
    """One side of a relayed connection; what it reads goes to the other side."""

    def __init__(self) -> None:
        self.other: _Half | None = None
        self.transport: asyncio.Transport | None = None
        self._early: list[bytes] = []  # before the other side was there

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    @override
    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self._early.append(data)
        else:
            self.other.transport.write(data)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def join(self, other: _Half) -> None:
        """Hand on what has come, and what will."""
        self.other, other.other = other, self
        assert other.transport is not None
        for data in self._early:
            other.transport.write(data)


async def _relay(owner: int) -> None:
    loop = asyncio.get_running_loop()
    joining: set[asyncio.Task[None]] = set()

    async def join(client: _Half) -> None:
        _, upstream = await loop.create_connection(_Half, "127.0.0.1", owner)
        client.join(upstream)

    def accept() -> _Half:
        client = _Half()
        task = loop.create_task(join(client))
        joining.add(task)
        task.add_done_callback(joining.discard)
        return client

    server = await loop.create_server(accept, "127.0.0.1", 0)
    print(f"{_READY}{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


@contextmanager
def _front(owner: int) -> Iterator[tuple[int, int]]:
    """A running front: its pid and its port."""
    command = [sys.executable, "-m", "bench.scaling.front", "--relay-to", str(owner)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, int(process.stdout.readline().removeprefix(_READY))
        finally:
            process.kill()


def _cpu_s(pid: int) -> float:
    return time.clock_gettime((~pid << 3) | 2)  # as `RunningServer.cpu_s`


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both ways in turn and print a line for each prompt length."""
    args = _parser().parse_args(argv)
    if args.relay_to is not None:
        uvloop.run(_relay(args.relay_to))
        return 0
    raise_descriptor_limit()
    print("| isl | service alone | front | service behind it | ratio |\n|---|---|---|---|---|")
    with ExitStack() as stack:
        (contender,) = contenders((OURS,))
        server = stack.enter_context(RunningServer(contender))
        publishers = stack.enter_context(Publishers(_WORKERS, shared=True))
        target = Target(server, publishers, args.connections)
        target.register_workers()
        pid, port = stack.enter_context(_front(server.address[1]))
        for isl in map(int, args.isl.split(",")):
            rounds = [_round(server, pid, port, isl, args) for _ in range(args.rounds + 1)][1:]
            alone, front, behind = map(statistics.median, zip(*rounds, strict=True))
            ratio = (front + behind) / alone
            print(f"| {isl} | {alone:.1f} | {front:.1f} | {behind:.1f} | {ratio:.2f} |")
    return 0


def _round(
    server: RunningServer, pid: int, port: int, isl: int, args: argparse.Namespace
) -> tuple[float, float, float]:
    operation, check = selections(range(1, _WORKERS + 1), isl, _RING)
    costs = []
    for address in (server.address, ("127.0.0.1", port)):
        front, behind = _cpu_s(pid), server.cpu_s()
        drive(
            *(address, operation, check),
            operations=range(args.operations),
            connections=args.connections,
        )
        costs += [_cpu_s(pid) - front, server.cpu_s() - behind]
    per_request = [one / args.operations * 1e6 for one in costs]
    return per_request[1], per_request[2], per_request[3]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling.front", description=__doc__)
    parser.add_argument("--isl", default="512,2048,8192", help="default: %(default)s")
    parser.add_argument("--connections", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--operations", type=int, default=6000, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--relay-to", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
