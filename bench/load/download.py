"""`python -m bench.load.download HOST PORT PATH`: one GET, timed to the last byte, by itself.

A process of its own, so that taking 100 MB does not delay the client that measures latencies. It
connects, says so, waits for a line, asks, and prints what it saw as JSON; what it counts in the
body it counts after the clock has stopped.
"""

from __future__ import annotations

import http.client
import sys
import time

import orjson

__all__ = ["main"]

_PIECE_BYTES = 1 << 20
_TIMEOUT_S = 120.0
_MARK = b'"tokens_hash"'  # once per block of a /dump


def main(host: str, port: str, path: str) -> int:
    """Download and report; 1 when the answer is not 200."""
    connection = http.client.HTTPConnection(host, int(port), timeout=_TIMEOUT_S)
    connection.connect()
    print("ready", flush=True)
    sys.stdin.readline()
    started_at = time.perf_counter()
    connection.request("GET", path)
    answer = connection.getresponse()
    pieces = []
    while piece := answer.read(_PIECE_BYTES):
        pieces.append(piece)
    seconds = time.perf_counter() - started_at
    body = b"".join(pieces)
    seen = {"seconds": seconds, "bytes": len(body), "blocks": body.count(_MARK)}
    print(orjson.dumps(seen).decode(), flush=True)
    return 0 if answer.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
