"""What tracing costs: `python -m bench.micro.tracing [--rounds 7]`.

CPU microseconds of the server process per POST /select of 512 tokens as hashes, 16 workers, four
connections: a service that does not trace and one that does, in turn in every round. What is
exported goes to a collector in this process, and all of it has gone before the CPU is read.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import msgspec

from bench.compare.servers import Contender, RunningServer
from bench.load.http import Answer, BadAnswer, ask, drive, request_bytes
from bench.load.prompts import Prompt, random_tokens

WORKERS = 16
RING = 256
ISL = 512
CONNECTIONS = 4
WARM_UP = 500
COMMAND = (sys.executable, "-m", "select_service", "--host", "127.0.0.1")
EVENTS_OFF = {"DYN_USE_KV_EVENTS": "false"}


class Case(NamedTuple):
    """One line of the table."""

    name: str
    server: str
    parent: str  # flags of the traceparent each request has of its own; "": it has none


CASES = (
    Case("off", "off", ""),
    Case("off, with a traceparent", "off", "01"),
    Case("on, ratio 0", "none", ""),
    Case("on, the parent is not sampled", "all", "00"),
    Case("on, ratio 0.01", "some", ""),
    Case("on, all sampled", "all", ""),
    Case("on, the parent is sampled", "all", "01"),
)
RATIOS = {"none": "0", "some": "0.01", "all": "1"}


class Collector(BaseHTTPRequestHandler):
    """Takes everything and keeps nothing."""

    def do_POST(self) -> None:
        """Take a batch."""
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=3000, help="of a case in a round")
    chosen = parser.parse_args()
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        servers = {"off": RunningServer(Contender("off", COMMAND, EVENTS_OFF))}
        for name, ratio in RATIOS.items():
            env = {
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
                "OTEL_TRACES_EXPORTER": "otlp",
                "OTEL_TRACES_SAMPLER_ARG": ratio,
                "OTEL_BSP_MAX_QUEUE_SIZE": "1000000",  # nothing is dropped
                "OTEL_BSP_SCHEDULE_DELAY": "50",
            }
            servers[name] = RunningServer(Contender(name, COMMAND, EVENTS_OFF | env))
        try:
            for server in servers.values():
                register(server.__enter__())
            report(measure(servers, chosen.rounds, chosen.requests))
        finally:
            for server in servers.values():
                server.__exit__(None, None, None)
            collector.shutdown()


def register(server: RunningServer) -> None:
    workers = [
        {"worker_id": number, "endpoint": f"http://w{number}", "block_size": 16}
        for number in range(WORKERS)
    ]
    posts = [request_bytes("POST", "/workers", msgspec.json.encode(one)) for one in workers]
    ask(server.address, posts)


def measure(
    servers: dict[str, RunningServer], rounds: int, requests: int
) -> dict[str, list[float]]:
    """Return CPU microseconds a request, by case and round."""
    rng = random.Random(1)
    bodies = [
        msgspec.json.encode(Prompt.of(random_tokens(rng, ISL)).hash_form()) for _ in range(RING)
    ]
    plain = [request_bytes("POST", "/select", body) for body in bodies]
    seen: dict[str, list[float]] = {case.name: [] for case in CASES}
    for number in range(rounds + 1):
        count = requests if number else WARM_UP
        for case in CASES if number % 2 else CASES[::-1]:
            sent = plain
            if case.parent:
                sent = [with_parent(plain[at % RING], rng, case.parent) for at in range(count)]
            spent = spent_us(servers[case.server], sent, count)
            if number:
                seen[case.name].append(spent)
    return seen


def with_parent(request: bytes, rng: random.Random, flags: str) -> bytes:
    ids = f"{rng.getrandbits(127) + 1:032x}-{rng.getrandbits(63) + 1:016x}"
    head, _, body = request.partition(b"\r\n\r\n")
    return head + f"\r\ntraceparent: 00-{ids}-{flags}\r\n\r\n".encode() + body


def spent_us(server: RunningServer, sent: list[bytes], requests: int) -> float:
    before = server.cpu_s()
    drive(
        server.address,
        lambda number: (sent[number % len(sent)],),
        check,
        operations=range(requests),
        connections=CONNECTIONS,
    )
    while waiting(server):
        time.sleep(0.2)  # a scrape costs a few milliseconds
    return (server.cpu_s() - before) / requests * 1e6


def waiting(server: RunningServer) -> float:
    """Spans that are not exported yet."""
    (answer,) = ask(server.address, [request_bytes("GET", "/metrics", b"")])
    line = next(
        line for line in answer.splitlines() if line.startswith(b"select_service_trace_queue_spans")
    )
    return float(line.split()[1])


def check(answer: Answer) -> None:
    if answer.status != 200:
        raise BadAnswer(f"{answer.status} {answer.body!r:.300}")


def report(costs: dict[str, list[float]]) -> None:
    first = statistics.median(costs[CASES[0].name])
    for name, some in costs.items():
        median = statistics.median(some)
        print(f"{name:32}{median:8.1f}{median - first:+8.1f}   ({min(some):.1f}..{max(some):.1f})")


if __name__ == "__main__":
    main()
