"""What the form of a body costs: `python -m bench.micro.forms [--isl 512,2048,8192] [--uds]`.

CPU microseconds of the server process per POST /select of a prompt nobody holds, 16 workers: hashes
as JSON, hashes packed in MessagePack, tokens packed, and tokens as JSON. Every form is sent in turn
in every round over the same TCP connections, with `--uds` over a Unix socket of the same process as
well; printed are medians over the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from array import array
from typing import TYPE_CHECKING

import msgspec

from bench.compare.servers import Contender, RunningServer
from bench.load.http import Answer, BadAnswer, ask, drive, request_bytes
from bench.load.prompts import Prompt, random_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.load.http import Address

WORKERS = 16
RING = 64  # distinct prompts, sent in turn
CONNECTIONS = 4
WARM_UP = 200
MSGPACK = "application/msgpack"


def hashes_as_json(prompt: Prompt) -> bytes:
    return json_request(prompt.hash_form())


def tokens_as_json(prompt: Prompt) -> bytes:
    return json_request(prompt.token_form())


def packed_hashes(prompt: Prompt) -> bytes:
    return packed_request(
        {
            "block_hashes": array("Q", prompt.block_hashes).tobytes(),
            "sequence_hashes": array("Q", prompt.sequence_hashes).tobytes(),
            "isl_tokens": len(prompt.token_ids),
        }
    )


def packed_tokens(prompt: Prompt) -> bytes:
    return packed_request({"token_ids": array("I", prompt.token_ids).tobytes()})


FORMS: dict[str, Callable[[Prompt], bytes]] = {
    "JSON hashes": hashes_as_json,
    "packed hashes": packed_hashes,
    "packed tokens": packed_tokens,
    "JSON tokens": tokens_as_json,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isl", default="512,2048,8192", help="tokens a prompt")
    parser.add_argument("--form", default=",".join(FORMS), help="which, by comma")
    parser.add_argument("--uds", action="store_true", help="over a Unix socket as well")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=1500, help="of a form in a round")
    chosen = parser.parse_args()
    forms = chosen.form.split(",")
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/select.sock"
        command = (sys.executable, "-m", "select_service", "--host", "127.0.0.1", "--uds", path)
        with RunningServer(Contender("ours", command, {"DYN_USE_KV_EVENTS": "false"})) as server:
            register(server.address)
            doors: dict[str, Address] = {"TCP": server.address}
            if chosen.uds:
                doors["UDS"] = path
            print(
                f"{'isl':>6} {'form':14}" + "".join(f"{application:>10}" for application in doors)
            )
            for isl in map(int, chosen.isl.split(",")):
                report(isl, measure(server, doors, forms, isl, chosen.rounds, chosen.requests))


def register(address: Address) -> None:
    workers = [
        {"worker_id": number, "endpoint": f"http://w{number}", "block_size": 16}
        for number in range(WORKERS)
    ]
    ask(address, [request_bytes("POST", "/workers", msgspec.json.encode(one)) for one in workers])


def measure(
    server: RunningServer,
    doors: dict[str, Address],
    forms: list[str],
    isl: int,
    rounds: int,
    requests: int,
) -> dict[str, dict[str, float]]:
    """Return CPU microseconds a request, by form and door."""
    rng = random.Random(isl)
    prompts = [Prompt.of(random_tokens(rng, isl)) for _ in range(RING)]
    rings = {form: [FORMS[form](prompt) for prompt in prompts] for form in forms}
    seen: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for form, ring in rings.items():
            for application, address in doors.items():
                spent = spent_us(server, address, ring, requests if number else WARM_UP)
                if number:
                    seen.setdefault((form, application), []).append(spent)
    return {
        form: {application: statistics.median(seen[form, application]) for application in doors}
        for form in forms
    }


def spent_us(server: RunningServer, address: Address, ring: list[bytes], requests: int) -> float:
    before = server.cpu_s()
    drive(
        address,
        lambda number: (ring[number % RING],),
        check,
        operations=range(requests),
        connections=CONNECTIONS,
    )
    return (server.cpu_s() - before) / requests * 1e6


def check(answer: Answer) -> None:
    if answer.status != 200 or b'"longest_matched":0' not in answer.body:
        raise BadAnswer(f"{answer.status} {answer.body!r:.300}")


def json_request(fields: dict[str, object]) -> bytes:
    return request_bytes("POST", "/select", msgspec.json.encode(fields))


def packed_request(fields: dict[str, object]) -> bytes:
    return request_bytes("POST", "/select", msgspec.msgpack.encode(fields), MSGPACK)


def report(isl: int, costs: dict[str, dict[str, float]]) -> None:
    for form, by_door in costs.items():
        print(f"{isl:6} {form:14}" + "".join(f"{cost:10.1f}" for cost in by_door.values()))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
