"""What is left when a server decides nothing: `python -m bench.micro.floor`.

CPU µs of a request of 512 tokens as hashes, at 300 requests a second and saturated, of servers that
always say the same, and of ours and the reference service beside them: one of forty lines of C (a
read, a write, an epoll), and a bare protocol on uvloop with the same answer. What the first takes
is the kernel's; what the second takes more is the price of an interpreter whose caches are cold.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from typing_extensions import override

from bench.compare.servers import Contender, RunningServer, contenders
from bench.compare.target import Target
from bench.compare.workloads import selections
from bench.load.events import Publishers
from bench.load.http import drive
from bench.load.paced import Schedule, drive_paced
from bench.output import raise_descriptor_limit

WORKERS = 16
ISL = 512
RATE = 300.0
BODY = (
    b'{"worker_id":1,"dp_rank":0,"effective_prefill_tokens":512,"model_name":"bench",'
    b'"tenant_id":"default","endpoint":"http://worker-1.invalid:8000","block_size":16}'
)
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 159\r\n\r\n" + BODY


class Constant(asyncio.Protocol):
    """Answers whatever arrives as if it were one request."""

    transport: asyncio.Transport

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment] # uvloop's are not of that class

    @override
    def data_received(self, data: bytes) -> None:
        self.transport.write(ANSWER)


def serve(port: int) -> None:
    """Be the server on uvloop, for ever."""
    import uvloop  # not everywhere

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Constant, "127.0.0.1", port)
        await server.serve_forever()

    uvloop.run(run())


def floors(folder: Path) -> list[Contender]:
    """The servers that decide nothing; the one in C where there is a compiler."""
    found = [Contender("uvloop, constant", (sys.executable, "-m", "bench.micro.floor"))]
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is not None:
        binary = folder / "floor"
        source = Path(__file__).with_suffix(".c")
        subprocess.run([compiler, "-O2", "-o", str(binary), str(source)], check=True)
        found.insert(0, Contender("C, constant", (str(binary),)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, help="be the server on uvloop")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0, help="at 300/s, in each round")
    parser.add_argument("--contenders", default="ours,1.6.1")
    chosen = parser.parse_args()
    if chosen.port is not None:
        serve(chosen.port)
        return
    raise_descriptor_limit()
    operation, check = selections(range(1, WORKERS + 1), ISL, 256)
    costs: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [stack.enter_context(RunningServer(one)) for one in floors(folder)]
        for one in contenders(chosen.contenders.split(",")):
            server = stack.enter_context(RunningServer(one))
            publishers = stack.enter_context(Publishers(WORKERS, shared=True))
            Target(server, publishers, 1).register_workers()
            servers.append(server)
        for number in range(chosen.rounds + 1):
            for server in servers:
                of_server = costs.setdefault(server.name, {"paced": [], "saturated": []})
                before = server.cpu_s()
                count = round(RATE * chosen.seconds)
                schedule = Schedule(time.perf_counter() + 0.02, RATE, count)
                drive_paced(server.address, operation, check, schedule)
                between = server.cpu_s()
                drive(server.address, operation, check, operations=range(6000), connections=16)
                if number:
                    of_server["paced"].append((between - before) / count * 1e6)
                    of_server["saturated"].append((server.cpu_s() - between) / 6000 * 1e6)
    print(f"{'CPU µs / request':20} {'300/s':>8} {'least':>8} {'saturated':>10}")
    for name, of_server in costs.items():
        paced = of_server["paced"]
        full = median(of_server["saturated"])
        print(f"{name:20} {median(paced):8.1f} {min(paced):8.1f} {full:10.1f}")


if __name__ == "__main__":
    main()
