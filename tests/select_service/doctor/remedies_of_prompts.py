"""Faults of prompts: what callers and engines hash differently, and its remedies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from select_service.types import SelectAndReserveRequest, WorkerSpec
from tests.indexer.encoding import encode_batch, encode_event, removed
from tests.live.ports import HOST
from tests.select_service.doctor.remedies import Found, remedy
from tests.select_service.doctor.test_prompts import Ask, converse, hashed, plainly
from tests.select_service.doctor.ward import BLOCK, Engine, Ward, prompt
from tests.select_service.edge.serving import listening

DIGEST = "5a" * 32


async def _mismatch(
    ward: Ward, found: Found, wrong: Ask, right: Ask = plainly, **twist: Any
) -> None:
    engine = ward.engine()
    if twist:
        engine.twist = lambda event: event | twist
    await ward.hire(engine)
    await converse(ward, {1: engine}, wrong, first=0)
    await found("none matched", model_name="default")
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
    """Also where only the engine names it."""

    def right(tokens: Sequence[int]) -> dict[str, Any]:
        return plainly(tokens) | {"lora_name": "a"}

    await _mismatch(ward, found, plainly, right, lora_name="a")


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
    await found(model_name="default")
    old.twist = lambda event: encode_event(event, "array-int")[:9]
    await converse(ward, {1: old}, plainly, first=200)
    await found()  # that others' prompts match does not clear it
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
    await ward.received(engine)
    await converse(ward, {1: engine}, plainly, first=0)


@remedy("past-events-missing")
async def _(ward: Ward, found: Found) -> None:
    """Or reset the engine's prefix cache once."""
    engine = await _joined_late(ward, found, replay=False)
    engine.send([{"type": "AllBlocksCleared"}])
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
        await ward.received(engine)
        await converse(ward, {1: engine}, plainly, first=0)


async def _run_prompt(ward: Ward, tokens: Sequence[int], cached_tokens: int, times: int) -> None:
    """Run a prompt some times; the engine says what it found of it."""
    for _ in range(times):
        ward.reported += 1
        name = f"reported{ward.reported}"
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
    await ward.received(engine)
    await _run_prompt(ward, prompt(1), 3 * BLOCK, 4)
    assert await ward.codes() == []
    await _run_prompt(ward, prompt(1), 0, 30)
    await found(worker_id=1)
    await _run_prompt(ward, prompt(1), 3 * BLOCK, 60)


@remedy("index-untrue")
async def _(ward: Ward, found: Found) -> None:
    """Removals did not arrive: with a replay_endpoint its index is read again."""
    engine = ward.engine()
    await ward.hire(engine, replay=False)
    for number in (1, 2):
        engine.compute(prompt(number))
    await ward.received(engine)
    await _run_prompt(ward, prompt(1), 3 * BLOCK, 4)
    await ward.codes()
    names = [engine.held.pop(key) for key in [*engine.held] if key[0][0] == prompt(1)[0]]
    engine.sockets.publish(encode_batch([removed(names)], ts=ward.clock.wall()), is_lost=True)
    await _run_prompt(ward, prompt(1), 0, 30)
    await found()
    await ward.hire(engine)
    engine.compute(prompt(3))
    await ward.received(engine)
    await ward.until(lambda: not any(s.is_replaying for s in ward.streams()))
    found_now = ward.service.overlap_scores(ward.scores(prompt(1))).workers
    assert [row.device_blocks for row in found_now] == [0]
    for number in (2, 3):
        await _run_prompt(ward, prompt(number), 3 * BLOCK, 30)
