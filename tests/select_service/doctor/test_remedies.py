"""Every finding of the doctor: it appears, its remedy is carried out as written, and it goes.

`REMEDIES` has a row for each; a finding without one fails. Those that need other processes or a
cluster have theirs where these are, and are named.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import pytest
import zmq
from msgspec.structs import replace

from indexer.edge.curve import KeyPair
from select_service.core.diagnostics.causes import CAUSES, UNREACHABLE_FROM_HERE
from select_service.core.replication.message_codec import encode_message
from select_service.core.replication.messages import Heartbeat
from select_service.edge.driver.driver import Driver
from select_service.errors import NoSchedulableWorker
from select_service.types import ReservationRequest, SelectAndReserveRequest, WorkerSpec
from select_service.types.admission import AdmissionChange, RankMetrics, WorkerMetrics
from tests.indexer.encoding import encode_batch, encode_event, message, removed, stored
from tests.live.ports import HOST, free_port
from tests.select_service.doctor.test_events import UNPOLLED, has_lost, serve_prompts
from tests.select_service.doctor.test_fleet import NO_EVENTS, Peer, links, wait_together
from tests.select_service.doctor.test_prompts import DIGEST, Ask, converse, hashed, plainly
from tests.select_service.doctor.ward import BLOCK, STREAMS, Engine, Ward, play, prompt
from tests.select_service.edge.serving import listening

Context = zmq.Context[zmq.Socket[bytes]]
Found = Callable[[], Awaitable[None]]
Scenario = Callable[[Ward, Found], Awaitable[None]]


class Remedy(NamedTuple):
    scenario: Scenario
    settings: dict[str, Any]


REMEDIES: Final[dict[str, list[Remedy]]] = {}
"""By code: each plants the fault, awaits `found`, and carries out what the remedy says."""

ELSEWHERE: Final = {
    "discovery-stale": (
        "tests.select_service.edge.discovery.test_shared_ids",
        "test_a_source_that_cannot_be_read_is_a_finding",
    ),
    "worker-id-shared": (
        "tests.select_service.edge.discovery.test_shared_ids",
        "test_a_finding_and_a_metric_tell",
    ),
    "replica-refuses-us": ("tests.e2e.test_doctor_refused", "test_replicas_that_refuse_us"),
    "unreachable-from-here": ("tests.select_service.doctor.test_cli", "test_ports_seen_from_here"),
}
"""By code: the module and the test that finds it, carries out its remedy and sees it go."""


def remedy(code: str, **settings: Any) -> Callable[[Scenario], Scenario]:
    def note(scenario: Scenario) -> Scenario:
        REMEDIES.setdefault(code, []).append(Remedy(scenario, settings))
        return scenario

    return note


# -- records ---------------------------------------------------------------------------------------


@remedy("worker-incomplete", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    """Register it again with what the reasons name."""
    ward.register(1, endpoint=None)
    ward.register(2)
    await ward.pass_time(10)
    await found()
    ward.register(1)


@remedy("worker-incomplete", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    """One that differs gets a model_name of its own."""
    ward.register(1)
    ward.register(2, is_eagle=True)
    await ward.pass_time(10)
    await found()
    ward.register(2, is_eagle=True, model_name="drafted")


@remedy("worker-incomplete", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    """Or the others go."""
    ward.register(1)
    ward.register(2, block_size=2 * BLOCK)
    await ward.pass_time(10)
    await found()
    ward.service.delete_worker(1)


@remedy("no-workers", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    await ward.pass_time(70)
    await found()
    ward.register(1)


@remedy("endpoint-shared", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    one, two = ward.engine(), ward.engine()
    await ward.hire(one, 1)
    await ward.hire(one, 2)
    await found()
    await ward.hire(two, 2)


# -- event streams ---------------------------------------------------------------------------------


@remedy("events-unreachable")
async def _(ward: Ward, found: Found) -> None:
    """Start the engine with KV events on."""
    engine = ward.engine()
    ports = engine.sockets.ports
    await ward.hire(engine)
    engine.sockets.close()
    ward.engines.remove(engine)
    (stream,) = ward.streams()
    await ward.until(lambda: not ward.is_connected(stream))
    await ward.pass_time(40)
    await found()
    ward.engine(ports)
    await ward.until(lambda: ward.is_connected(stream))


@remedy("events-unreachable")
async def _(ward: Ward, found: Found) -> None:
    """Register the port that it publishes on."""
    engine = ward.engine()
    ward.register(1, kv_events_endpoint=f"tcp://{HOST}:{free_port()}")
    await ward.pass_time(40)
    await found()
    await ward.hire(engine)


@remedy("events-refused")
async def _(ward: Ward, found: Found) -> None:
    """Register no key: the engine does not encrypt."""
    engine = ward.engine()
    key = KeyPair.new().public
    ward.register(1, kv_events_endpoint=engine.sockets.endpoint, curve_public_key=key)
    (stream,) = ward.streams()

    def is_refused() -> bool:
        link = ward.service.sources.link(stream)
        return link is not None and link.is_refused

    await ward.until(is_refused)
    await ward.pass_time(40)
    await ward.until(is_refused)
    await found()
    await ward.hire(engine)


@remedy("no-events", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    """Switch on enable_kv_cache_events: the engine begins to tell."""
    engine = ward.engine()
    await ward.hire(engine, replay=False)
    await ward.codes()
    for number in range(4):
        await ward.ask(prompt(number))
    await ward.pass_time(40)
    await found()
    await serve_prompts(ward, engine, 10)


@remedy("no-events", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    """Register the endpoint that this rank's events are on."""
    wrong, engine = ward.engine(), ward.engine()
    await ward.hire(wrong, replay=False)
    await ward.codes()
    for number in range(4):
        await ward.ask(prompt(number))
    await ward.pass_time(40)
    await found()
    await ward.hire(engine, replay=False)


@remedy("wrong-topic", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    wrong, engine = ward.engine(), ward.engine()
    await ward.hire(wrong, replay=False)
    (stream,) = ward.streams()
    report = msgspec.msgpack.encode({"dp_rank": 0, "kv_used_blocks": 1})
    wrong.sockets.pub.send_multipart([b"kv_metrics", report])
    await ward.until(lambda: ward.service.sources.link(stream).load_reports)  # type: ignore[union-attr]
    for number in range(4):
        await ward.ask(prompt(number))
    await ward.pass_time(40)
    await found()
    await ward.hire(engine, replay=False)


@remedy("events-unreadable", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    wrong, engine = ward.engine(), ward.engine()
    await ward.hire(wrong, replay=False)
    (stream,) = ward.streams()
    for number in range(5):
        wrong.sockets.pub.send_multipart([b"metrics", b"%d" % number])
    await ward.until(lambda: stream.tallies.messages == 5)
    await found()
    await ward.hire(engine, replay=False)


@remedy("block-size-mismatch")
async def _(ward: Ward, found: Found) -> None:
    """Register each of a fleet with the engines' size; none needs a restart of the service."""
    engines = {1: ward.engine(), 2: ward.engine()}
    for worker_id, engine in engines.items():
        engine.block = 32
        await ward.hire(engine, worker_id)
        for number in range(6):
            engine.compute(prompt(number))
        await ward.heard(engine, worker_id)
    await found()
    ward.register(
        1, block_size=32, kv_events_endpoint=engines[1].sockets.endpoint
    )  # waits until the other agrees
    await ward.hire(engines[2], 2, block_size=32)
    await ward.until(lambda: ward.streams(1))
    for worker_id, engine in engines.items():
        await ward.until(lambda: ward.is_connected(ward.streams(worker_id)[0]))
        engine.compute(prompt(40))
        await ward.heard(engine, worker_id)
    assert ward.service.core.reader.schedulable == 2
    told = ward.service.overlap_scores(ward.scores(prompt(40)))
    assert [one.device_blocks for one in told.workers] == [1, 1]


@remedy("block-size-mismatch")
async def _(ward: Ward, found: Found) -> None:
    """Those that differ get a model_name of their own."""
    engine, other = ward.engine(), ward.engine()
    engine.block = 32
    await ward.hire(engine)
    await ward.hire(other, 2)
    for number in range(6):
        engine.compute(prompt(number))
    await ward.heard(engine)
    await found()
    await ward.hire(engine, block_size=32, model_name="other")
    engine.compute(prompt(40))
    await ward.heard(engine)


def _in_pairs(event: dict[str, Any]) -> dict[str, Any]:
    tokens = event["token_ids"]
    return event | {"token_ids": list(itertools.pairwise([*tokens, tokens[-1] + 1]))}


@remedy("eagle-mismatch")
async def _(ward: Ward, found: Found) -> None:
    """SGLang with EAGLE: register it with is_eagle; it had pinned the other setting itself."""
    engine = ward.engine()
    engine.twist = _in_pairs
    await ward.hire(engine)
    await serve_prompts(ward, engine, 0)
    await found()
    await ward.hire(engine, is_eagle=True)
    await serve_prompts(ward, engine, 10)
    told = ward.service.overlap_scores(ward.scores(prompt(10)))
    assert [one.device_blocks for one in told.workers] == [3]


@remedy("eagle-mismatch")
async def _(ward: Ward, found: Found) -> None:
    """And the other way round."""
    engine = ward.engine()
    await ward.hire(engine, is_eagle=True)
    await serve_prompts(ward, engine, 0)
    await found()
    await ward.hire(engine)
    await serve_prompts(ward, engine, 10)


@remedy("events-not-indexed")
async def _(ward: Ward, found: Found) -> None:
    """An engine that sends lora_name."""
    engine = ward.engine()
    engine.twist = lambda event: event | {"lora_id": 7}
    await ward.hire(engine)
    await serve_prompts(ward, engine, 0)
    await found()
    newer = engine.restart()
    newer.twist = lambda event: event | {"lora_id": 7, "lora_name": "adapter"}
    await ward.until(newer.sockets.has_subscriber)
    await serve_prompts(ward, newer, 0, 8)


@remedy("events-lost", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    """Give the worker a replay_endpoint."""
    engine = ward.engine()
    await ward.hire(engine, replay=False)
    for round_ in range(3):
        await serve_prompts(ward, engine, 10 * round_)
        await ward.pass_time(10)
        engine.sockets.sequence += 1
    await found()
    engine.sockets.sequence -= 1
    await ward.hire(engine)
    engine.sockets.publish(msgspec.msgpack.encode([ward.clock.wall(), [], None]), is_lost=True)
    await serve_prompts(ward, engine, 90)


@remedy("events-too-long", streams=replace(STREAMS, message_bytes_max=10_000))
async def _(ward: Ward, found: Found) -> None:
    """Start with a --kv-message-bytes-max above the size named: all is listened to anew."""
    engine = ward.engine()
    await ward.hire(engine)
    (stream,) = ward.streams()
    await serve_prompts(ward, engine, 0)
    engine.tell([{"type": "BlockRemoved", "block_hashes": [b"x" * 15_000]}])
    await ward.until(lambda: has_lost(stream, 1))
    await ward.until(lambda: ward.is_connected(stream) and not stream.is_replaying)
    await serve_prompts(ward, engine, 10)
    await found()
    ward.service.delete_worker(1)
    ward.service.core.registry.limits.message_bytes_max = 20_000
    await ward.hire(engine)
    engine.tell([{"type": "BlockRemoved", "block_hashes": [b"x" * 15_000]}])
    await serve_prompts(ward, engine, 20)
    (stream,) = ward.streams()
    assert not stream.tallies.bad_messages


@remedy("replay-mute")
async def _(ward: Ward, found: Found) -> None:
    """Set replay_endpoint to the engine's."""
    engine, mute = ward.engine(), ward.engine()
    mute.sockets.is_mute = True
    await ward.hire(engine, replay_endpoint=mute.sockets.replay_endpoint)
    await serve_prompts(ward, engine, 0)
    await ward.pass_time(60)
    await found()
    await ward.hire(engine)


@remedy("replay-mute")
async def _(ward: Ward, found: Found) -> None:
    """Remove it from the record if the engine has none."""
    engine = ward.engine()
    engine.sockets.is_mute = True
    await ward.hire(engine)
    await serve_prompts(ward, engine, 0)
    await ward.pass_time(60)
    await found()
    await ward.hire(engine, replay=False)


@remedy("replay-wrong-rank")
async def _(ward: Ward, found: Found) -> None:
    """Name each rank's own replay endpoint in replay_endpoints."""
    engines = [ward.engine(), ward.engine()]
    for rank, engine in enumerate(engines):
        engine.dp_rank = rank
    fields: dict[str, Any] = {
        "kv_events_endpoint": None,
        "kv_events_endpoints": {str(r): one.sockets.endpoint for r, one in enumerate(engines)},
        "replay_endpoint": None,
        "data_parallel_size": 2,
    }
    shared = dict.fromkeys("01", engines[0].sockets.replay_endpoint)
    await ward.hire(engines[0], **fields, replay_endpoints=shared)
    for engine in engines:
        engine.compute(prompt(1))
    await ward.until(lambda: all(one.cursor.last == 0 for one in ward.streams()))
    await ward.pass_time(30)
    await found()
    own = {str(rank): one.sockets.replay_endpoint for rank, one in enumerate(engines)}
    await ward.hire(engines[0], **fields, replay_endpoints=own)
    for engine in engines:
        engine.compute(prompt(2))
    await ward.until(lambda: all(one.cursor.last == 1 for one in ward.streams()))


@remedy("replay-of-another-worker")
async def _(ward: Ward, found: Found) -> None:
    mine, other = ward.engine(), ward.engine()
    for number in range(3):
        mine.compute(prompt(number))
    for number in range(6):
        other.compute(prompt(50 + number))
    await ward.hire(mine, replay_endpoint=other.sockets.replay_endpoint)
    (stream,) = ward.streams()
    mine.compute(prompt(3))
    await ward.until(lambda: not stream.has_replay)
    await found()
    await ward.hire(mine)


@remedy("sequence-jumps", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    """Register the endpoint of one engine's own publisher."""
    both, engine = ward.engine(), ward.engine()
    await ward.hire(both, replay=False)
    await serve_prompts(ward, both, 0)
    await ward.codes()
    (stream,) = ward.streams()
    before = stream.tallies.messages
    for number in range(4):
        for seq in (number, 100 + number):
            event = stored([5000 + seq], [seq * BLOCK + at for at in range(BLOCK)])
            payload = msgspec.msgpack.encode([ward.clock.wall(), [event], None])
            both.sockets.pub.send_multipart(message(seq, payload))
    await ward.until(lambda: stream.tallies.messages == before + 8)
    await found()
    await ward.hire(engine, replay=False)


@remedy("restart-storm")
async def _(ward: Ward, found: Found) -> None:
    """Take the worker out."""
    engine = ward.engine()
    ward.register(2, kv_events_endpoint=ward.engine().sockets.endpoint)
    await ward.hire(engine)
    await ward.codes()
    (stream,) = ward.streams()
    for life in range(1, 5):
        await serve_prompts_to(ward, engine, 10 * life, life)
        engine = engine.restart()
        await ward.until(engine.sockets.has_subscriber)
        await ward.until(lambda: ward.is_connected(stream))
        ward.clock.skipped += 5
    await serve_prompts_to(ward, engine, 90, 5)
    await found()
    ward.service.delete_worker(1)


async def serve_prompts_to(ward: Ward, engine: Engine, first: int, count: int = 6) -> None:
    for number in range(first, first + count):
        await ward.ask(prompt(number), allowed_worker_ids=[1])
        engine.compute(prompt(number))
    await ward.heard(engine)


@remedy("clock-skew")
async def _(ward: Ward, found: Found) -> None:
    engine = ward.engine()
    engine.clock_off_s = -500.0
    await ward.hire(engine)
    await serve_prompts(ward, engine, 0)
    await ward.pass_time(10)
    await serve_prompts(ward, engine, 10)
    await found()
    engine.clock_off_s = 0.0
    await serve_prompts(ward, engine, 20)


@remedy("clock-set", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    """Let the host slew: it is told for as long as what depends on it may be wrong."""
    ward.register(1)
    off = [0.0]
    ward.service.doctor()._wall_clock = lambda: ward.clock.wall() + off[0]
    await ward.pass_time(20)
    off[0] = -3600.0
    await found()
    for _ in range(13):
        off[0] += 4.0
        await ward.pass_time(10)


@remedy("rank-offset", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    engines = [ward.engine(), ward.engine()]
    for rank, engine in enumerate(engines):
        engine.dp_rank = rank
    fields: dict[str, Any] = {"kv_events_endpoint": None, "data_parallel_size": 2}
    right = {str(rank): one.sockets.endpoint for rank, one in enumerate(engines)}
    swapped = {"0": right["1"], "1": right["0"]}
    await ward.hire(engines[0], replay=False, **fields, kv_events_endpoints=swapped)
    for engine in engines:
        engine.compute(prompt(1))
    await ward.until(lambda: all(s.cursor.last == 0 for s in ward.streams()))
    await found()
    await ward.hire(engines[0], replay=False, **fields, kv_events_endpoints=right)


# -- prompts ---------------------------------------------------------------------------------------


async def _mismatch(
    ward: Ward, found: Found, wrong: Ask, right: Ask = plainly, **twist: Any
) -> None:
    engine = ward.engine()
    if twist:
        engine.twist = lambda event: event | twist
    await ward.hire(engine)
    await converse(ward, {1: engine}, wrong, first=0)
    await found()
    await converse(ward, {1: engine}, right, first=0)


@remedy("token-mismatch")
async def _(ward: Ward, found: Found) -> None:
    await _mismatch(ward, found, lambda tokens: plainly([7, 8, *tokens]))


@remedy("extra-first-token")
async def _(ward: Ward, found: Found) -> None:
    await _mismatch(ward, found, lambda tokens: plainly([1, *tokens]))


@remedy("block-hash-mismatch")
async def _(ward: Ward, found: Found) -> None:
    """Hash as `indexer.block_hashes` does."""

    def otherwise(tokens: Sequence[int]) -> dict[str, Any]:
        body = hashed(tokens)
        return body | {"block_hashes": [one ^ 1 for one in body["block_hashes"]]}

    await _mismatch(ward, found, otherwise, hashed)


@remedy("block-hash-mismatch")
async def _(ward: Ward, found: Found) -> None:
    """Or send token_ids."""

    def otherwise(tokens: Sequence[int]) -> dict[str, Any]:
        body = hashed(tokens)
        return body | {"block_hashes": [one ^ 1 for one in body["block_hashes"]]}

    await _mismatch(ward, found, otherwise, plainly)


@remedy("request-block-size")
async def _(ward: Ward, found: Found) -> None:
    def by_the_record(tokens: Sequence[int]) -> dict[str, Any]:
        size = ward.service.workers()[0].block_size
        assert size is not None
        return hashed(tokens, size)

    await _mismatch(ward, found, lambda tokens: hashed(tokens, 8), by_the_record)


@remedy("lora-mismatch")
async def _(ward: Ward, found: Found) -> None:
    def under(name: str) -> Ask:
        return lambda tokens: plainly(tokens) | {"lora_name": name}

    await _mismatch(ward, found, under("b"), under("a"), lora_name="a")


@remedy("lora-mismatch")
async def _(ward: Ward, found: Found) -> None:
    """Nothing for the base model."""
    await _mismatch(ward, found, lambda tokens: plainly(tokens) | {"lora_name": "a"})


@remedy("salt-mismatch")
async def _(ward: Ward, found: Found) -> None:
    """The same salt here and to the engine."""

    def salted(tokens: Sequence[int]) -> dict[str, Any]:
        return plainly(tokens) | {"cache_salt": "s3cret"}

    await _mismatch(ward, found, plainly, salted, cache_salt="s3cret")


@remedy("salt-mismatch")
async def _(ward: Ward, found: Found) -> None:
    """Or to neither."""
    await _mismatch(ward, found, lambda tokens: plainly(tokens) | {"cache_salt": "s"})


def _salted_array(salt: str) -> Callable[[dict[str, Any]], Any]:
    def twist(event: dict[str, Any]) -> Any:
        keys = {} if event["parent_block_hash"] else {"extra_keys": [[salt]]}
        return encode_event(event | keys, "array-int")[:9]

    return twist


async def two_ranks(ward: Ward) -> list[Engine]:
    """A worker with two data-parallel ranks, each with a cache of its own."""
    ranks = [ward.engine(), ward.engine()]
    for number, engine in enumerate(ranks):
        engine.dp_rank = number
    endpoints = {str(one.dp_rank): one.sockets.endpoint for one in ranks}
    await ward.hire(ranks[0], data_parallel_size=2, kv_events_endpoints=endpoints, replay=False)
    return ranks


async def send(ward: Ward, ranks: list[Engine], numbers: range, shift: int) -> None:
    """Prompts that a rank computes which is so many off the reserved one."""
    for number in numbers:
        body = {"reservation_id": f"p{number}", **plainly(prompt(number))}
        asked = msgspec.convert(body, SelectAndReserveRequest)
        answer = await ward.service.select_and_reserve(asked)
        at: int = answer.dp_rank  # type: ignore[union-attr]
        ranks[(at + shift) % 2].compute(prompt(number))
        ward.service.free(f"p{number}")
    await ward.rest()
    await ward.pass_time(40)


@remedy("rank-ignored")
async def _(ward: Ward, found: Found) -> None:
    """Pass the rank on."""
    ranks = await two_ranks(ward)
    await send(ward, ranks, range(8), shift=1)
    await found()
    for first in range(8, 72, 8):
        await send(ward, ranks, range(first, first + 8), shift=0)


@remedy("salt-ambiguous")
async def _(ward: Ward, found: Found) -> None:
    """Run vLLM 0.20.2 or newer."""
    old = ward.engine()

    def with_salt(tokens: Sequence[int]) -> dict[str, Any]:
        return plainly(tokens) | {"cache_salt": DIGEST}

    old.twist = _salted_array(DIGEST)
    await ward.hire(old)
    await converse(ward, {1: old}, with_salt, first=0, rounds=2)
    await found()
    newer = old.restart()
    newer.twist = lambda event: (
        event if event["parent_block_hash"] else event | {"extra_keys": [[DIGEST]]}
    )
    await ward.until(newer.sockets.has_subscriber)
    await converse(ward, {1: newer}, with_salt, first=0, rounds=2)


@remedy("salt-ambiguous")
async def _(ward: Ward, found: Found) -> None:
    """A letter in front is enough."""
    old = ward.engine()
    old.twist = _salted_array(DIGEST)
    await ward.hire(old)
    ask = [DIGEST]

    def with_salt(tokens: Sequence[int]) -> dict[str, Any]:
        return plainly(tokens) | {"cache_salt": ask[0]}

    await converse(ward, {1: old}, with_salt, first=0, rounds=2)
    await found()
    ask[0] = "x" + DIGEST
    old.twist = _salted_array(ask[0])
    await converse(ward, {1: old}, with_salt, first=300, rounds=2)
    await ward.pass_time(300)


async def _joined_late(ward: Ward, found: Found, replay: bool) -> Engine:
    engine = ward.engine()
    for number in range(4):
        engine.compute(prompt(number))
    await ward.hire(engine, replay=replay)
    await converse(ward, {1: engine}, plainly, first=0)
    await found()
    return engine


@remedy("past-events-missing")
async def _(ward: Ward, found: Found) -> None:
    """Give the worker a replay_endpoint."""
    engine = await _joined_late(ward, found, replay=False)
    await ward.hire(engine)
    engine.compute(prompt(99))
    await ward.heard(engine)
    await converse(ward, {1: engine}, plainly, first=0)


@remedy("past-events-missing")
async def _(ward: Ward, found: Found) -> None:
    """Or reset the engine's prefix cache once."""
    engine = await _joined_late(ward, found, replay=False)
    engine.tell([{"type": "AllBlocksCleared"}])
    engine.held.clear()
    await converse(ward, {1: engine}, plainly, first=0)


@remedy("past-events-missing")
async def _(ward: Ward, found: Found) -> None:
    """Or start with the index of a replica that has been there for longer."""
    engine = ward.engine()
    async with listening() as (port, other, _):
        spec = {"worker_id": 1, "endpoint": "http://w1", "block_size": BLOCK}
        spec["kv_events_endpoint"] = engine.sockets.endpoint
        other.upsert_worker(msgspec.convert(spec, WorkerSpec))
        await ward.until(engine.sockets.has_subscriber)
        for number in range(4):
            engine.compute(prompt(number))
        ((stream, _, _),) = other.core.membership.sources()
        await ward.until(lambda: stream.cursor.last == engine.sockets.sequence - 1)
        await ward.hire(engine, replay=False)
        await converse(ward, {1: engine}, plainly, first=0)
        await found()
        await ward.restart(indexer_peers=[f"http://{HOST}:{port}"])
        recovery = ward.service.recovery
        assert recovery is not None
        await ward.until(lambda: recovery.outcome == "recovered")
        await ward.hire(engine, replay=False)
        engine.compute(prompt(99))
        await ward.heard(engine)
        await converse(ward, {1: engine}, plainly, first=0)


async def _run_prompt(ward: Ward, tokens: Sequence[int], cached_tokens: int, times: int) -> None:
    """Run a prompt some times; the engine says what it found of it."""
    for _ in range(times):
        ward.reported += 1
        name = f"told{ward.reported}"
        body = {"reservation_id": name, "token_ids": tokens}
        await ward.service.select_and_reserve(msgspec.convert(body, SelectAndReserveRequest))
        ward.service.prefill_complete(name, cached_tokens)
        ward.service.free(name)


@remedy("index-untrue")
async def _(ward: Ward, found: Found) -> None:
    """What it finds is what its events promise again."""
    engine = ward.engine()
    await ward.hire(engine)
    engine.compute(prompt(1))
    await ward.heard(engine)
    await _run_prompt(ward, prompt(1), 3 * BLOCK, 4)
    await ward.codes()
    await _run_prompt(ward, prompt(1), 0, 30)
    await found()
    await _run_prompt(ward, prompt(1), 3 * BLOCK, 60)


@remedy("index-untrue")
async def _(ward: Ward, found: Found) -> None:
    """Removals did not arrive: with a replay_endpoint its index is read again."""
    engine = ward.engine()
    await ward.hire(engine, replay=False)
    for number in (1, 2):
        engine.compute(prompt(number))
    await ward.heard(engine)
    await _run_prompt(ward, prompt(1), 3 * BLOCK, 4)
    await ward.codes()
    names = [engine.held.pop(key) for key in [*engine.held] if key[0][0] == prompt(1)[0]]
    engine.sockets.publish(encode_batch([removed(names)], ts=ward.clock.wall()), is_lost=True)
    await _run_prompt(ward, prompt(1), 0, 30)
    await found()
    await ward.hire(engine)
    engine.compute(prompt(3))
    await ward.heard(engine)
    await ward.until(lambda: not any(s.is_replaying for s in ward.streams()))
    found_now = ward.service.overlap_scores(ward.scores(prompt(1))).workers
    assert [row.device_blocks for row in found_now] == [0]
    for number in (2, 3):
        await _run_prompt(ward, prompt(number), 3 * BLOCK, 30)


# -- callers and reports ---------------------------------------------------------------------------


@remedy("unknown-model", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    ward.register(1, model_name="org/llama")

    async def ask(name: str) -> None:
        for number in range(6):
            with contextlib.suppress(NoSchedulableWorker):
                await ward.ask(prompt(number), model_name=name)

    await ask("Llama")
    await found()
    for _ in range(13):
        await ask("org/llama")
        await ward.pass_time(10)


@remedy("reservations-expire", config=NO_EVENTS, core={"reservation_ttl_s": 20.0})
async def _(ward: Ward, found: Found) -> None:
    ward.register(1)
    for number in range(12):
        body = {"reservation_id": f"kept{number}", "worker_id": 1, "token_ids": prompt(number)}
        ward.service.reserve(msgspec.convert(body, ReservationRequest))
    await ward.codes()
    ward.clock.skipped += 30
    await ward.until(lambda: ward.service.core.counters.reservations_expired == 12)
    await found()
    for number in range(30):
        await ward.ask(prompt(number))  # frees what it books


@remedy("reservations-outlived", config=NO_EVENTS, core={"reservation_ttl_s": 20.0})
async def _(ward: Ward, found: Found) -> None:
    """Book with a ttl_s."""
    ward.register(1)

    async def run(first: int, **fields: Any) -> None:
        for number in range(first, first + 4):
            body = {"reservation_id": f"long{number}", "worker_id": 1, "token_ids": prompt(number)}
            ward.service.reserve(msgspec.convert(body | fields, ReservationRequest))
        await ward.codes()
        ward.clock.skipped += 30
        if not fields:
            counters = ward.service.core.counters
            await ward.until(lambda: counters.reservations_expired == 4)
        for number in range(first, first + 4):
            ward.service.free(f"long{number}")

    await run(0)
    await found()
    for round_ in range(1, 6):
        await run(10 * round_, ttl_s=60.0)
        await ward.codes()


async def _load_reports(ward: Ward, found: Found) -> None:
    for worker_id in (1, 2):
        ward.register(worker_id)
    _report(ward, 2)
    ward.service.change_admission(AdmissionChange(policy="slo-shed"))
    ward.clock.skipped += 12
    await ward.until(lambda: [*ward.service.core.admitting.reports.stale()])
    await found()


def _report(ward: Ward, worker_id: int) -> None:
    metrics = WorkerMetrics(ranks=[RankMetrics(num_requests_waiting=0)])
    ward.service.report(worker_id, metrics)


@remedy("load-reports-stale", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    """Start the reporter again."""
    await _load_reports(ward, found)
    _report(ward, 2)


@remedy("load-reports-stale", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    """Register the worker anew."""
    await _load_reports(ward, found)
    ward.service.delete_worker(2)
    ward.register(2)


@remedy("load-reports-stale", config=NO_EVENTS)
async def _(ward: Ward, found: Found) -> None:
    """Set --load-report-stale-as unknown."""
    await _load_reports(ward, found)
    changed = {"load_report_stale_as": "unknown"}
    ward.service._carry_out(ward.service.core.admission.reconfigure({}, changed, ward.clock()))
    reports = ward.service.core.admitting.reports
    await ward.until(lambda: all(one.stale_as == "unknown" for *_, one in reports.stale()))


# -- replicas --------------------------------------------------------------------------------------

SYNCED: Final = {"config": NO_EVENTS, "replica_sync_port": 0}
"""With a port of its own each."""


@remedy("replica-unreachable", **SYNCED)
async def _(ward: Ward, found: Found) -> None:
    ward.register(1)
    peer = f"tcp://{HOST}:{free_port()}"
    ward.service.register_peer(peer)
    await ward.pass_time(40)
    await found()
    ward.service.deregister_peer(peer)


@remedy("replica-silent", **SYNCED)
async def _(ward: Ward, found: Found) -> None:
    """Name the replica's --replica-sync-port."""
    ward.register(1)
    with contextlib.closing(Peer(ward.context)) as wrong:
        ward.service.register_peer(wrong.endpoint)
        await ward.until(lambda: links(ward)[0].is_connected and wrong.socket.poll(0))
        await ward.pass_time(50)
        await found()
        ward.service.deregister_peer(wrong.endpoint)
        with contextlib.closing(Peer(ward.context)) as peer:
            ward.service.register_peer(peer.endpoint)
            await ward.until(lambda: peer.socket.poll(0))
            peer.beat()
            await ward.until(lambda: links(ward)[0].quiet_s < 1)


@remedy("replica-behind", **SYNCED)
async def _(ward: Ward, found: Found) -> None:
    """Set --advertise-url to where it can be reached: here, where its snapshot is."""
    ward.register(1)
    with contextlib.closing(Peer(ward.context)) as peer:
        nowhere = free_port()
        ward.service.register_peer(peer.endpoint)
        await ward.until(lambda: peer.socket.poll(0))
        await wait_together(ward, 80, lambda: peer.beat(nowhere))
        await found()
        view = ward.service.core.replicas.publishers.views[5]
        view.pulled(view.high, ward.clock(), ward.service.core.limits)  # as if it had been
        view.ask_again_at = None


@remedy("replica-workers-differ", **SYNCED)
async def _(ward: Ward, found: Found) -> None:
    ward.register(1)
    port = free_port()
    other = Driver(NO_EVENTS, replica_sync_port=port, clock=ward.clock)
    await other.start()
    try:
        spec = {"worker_id": 2, "endpoint": "http://w2", "block_size": BLOCK}
        other.upsert_worker(msgspec.convert(spec, WorkerSpec))
        ward.service.register_peer(f"tcp://{HOST}:{port}")
        await ward.until(lambda: links(ward)[0].is_connected)
        body = {"reservation_id": "r", "token_ids": prompt(1)}
        await other.select_and_reserve(msgspec.convert(body, SelectAndReserveRequest))
        await wait_together(ward, 80, lambda: None)
        await found()
        ward.register(2)
        await wait_together(ward, 5, lambda: None)
        assert "replica-workers-differ" not in await ward.codes()
    finally:
        await other.close()
    ward.service.deregister_peer(f"tcp://{HOST}:{port}")


@remedy("replica-namesake", **SYNCED)
async def _(ward: Ward, found: Found) -> None:
    """Start one of the two from an empty state directory: it has another id then."""
    ward.register(1)
    await ward.codes()
    core = ward.service.core
    with contextlib.closing(Peer(ward.context)) as peer:
        ward.service.register_peer(peer.endpoint)
        await ward.until(lambda: peer.socket.poll(0))
        namesake = Heartbeat(
            router_id=core.lifecycle.announcer.claims.router_id, epoch=1, seq=9, live=0, digest=0
        )
        peer.socket.send_multipart(encode_message(namesake))
        await ward.until(lambda: core.replicas.counters.namesakes)
        await found()
        for _ in range(17):
            await wait_together(ward, 8, peer.beat)
    ward.service.deregister_peer(peer.endpoint)


# -- the table -------------------------------------------------------------------------------------


def test_every_finding_has_its_remedy_carried_out() -> None:
    codes = {cause.code for cause in (*CAUSES, UNREACHABLE_FROM_HERE)}
    assert REMEDIES.keys() | ELSEWHERE.keys() == codes
    assert not REMEDIES.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("code", ELSEWHERE)
def test_those_elsewhere_are_there(code: str) -> None:
    module, name = ELSEWHERE[code]
    assert code in inspect.getsource(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    ("code", "row"), [(code, row) for code, rows in REMEDIES.items() for row in rows]
)
def test_a_remedy_makes_its_finding_go(code: str, row: Remedy, context: Context) -> None:
    async def scenario(ward: Ward) -> None:
        appeared = False

        async def found() -> None:
            nonlocal appeared
            assert code in await ward.codes()
            appeared = True

        await row.scenario(ward, found)
        assert appeared
        assert code not in await ward.pass_time(20), await ward.examine()

    settings = dict(row.settings)
    if "replica_sync_port" in settings:
        settings["replica_sync_port"] = free_port()
    play(context, scenario, **settings)
