"""Prompts that come again and match nothing, each for one reason, and those that have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import zmq

from indexer.core.hashing import block_hashes, sequence_hashes
from indexer.core.packing import unpack_i64
from tests.coroutines import run_by
from tests.indexer.encoding import removed, stored
from tests.select_service.doctor.ward import BLOCK, Engine, Ward, play, prompt

Context = zmq.Context[zmq.Socket[bytes]]
Ask = Callable[[Sequence[int]], dict[str, Any]]


def plainly(tokens: Sequence[int]) -> dict[str, Any]:
    return {"token_ids": list(tokens)}


def hashed(tokens: Sequence[int], size: int = BLOCK) -> dict[str, Any]:
    """The form for callers that hash themselves."""
    local = block_hashes(tokens, size)
    chain = sequence_hashes(local)
    return {
        "block_hashes": unpack_i64(local),
        "sequence_hashes": unpack_i64(chain),
        "isl_tokens": len(tokens),
    }


async def converse(
    ward: Ward, engines: dict[int, Engine], ask: Ask, *, first: int, rounds: int = 6
) -> None:
    """The same four conversations every ten seconds, and something new each time."""
    for round_ in range(rounds):
        for number in (*range(first, first + 4), first + 100 + round_):
            tokens = prompt(number)
            worker = await ward.ask(**ask(tokens))
            engines[worker].compute(tokens)
        for worker, engine in engines.items():
            await ward.received(engine, worker)
        await ward.pass_time(10)


@run_by(play, "context")
async def test_the_first_token_is_no_match_where_blocks_are_tiny(ward: Ward) -> None:
    """SGLang's pages may have one token, and BOS is the same for all."""
    engine = ward.engine()
    engine.block = 1
    engine.sees = lambda tokens: [1, *tokens[1:]]
    await ward.hire(engine, block_size=1)

    def after_bos(tokens: Sequence[int]) -> dict[str, Any]:
        return plainly([1, *tokens[1:]])

    await converse(ward, {1: engine}, after_bos, first=0)
    assert await ward.codes() == []
    engine.sees = lambda tokens: [1, *(token + 7 for token in tokens[1:])]
    await converse(ward, {1: engine}, after_bos, first=200, rounds=12)
    assert await ward.codes() == ["token-mismatch"]


@run_by(play, "context")
async def test_one_worker_of_two_caches_something_else(ward: Ward) -> None:
    engines = {1: ward.engine(), 2: ward.engine()}
    engines[2].sees = lambda tokens: [token + 7 for token in tokens]
    for worker, engine in engines.items():
        await ward.hire(engine, worker)

    async def both(rounds: int) -> None:
        for round_ in range(rounds):
            for worker, engine in engines.items():
                for number in (0, 1, 2, 3, 100 + round_):
                    tokens = prompt(number + 1000 * worker)
                    await ward.ask(tokens, allowed_worker_ids=[worker])
                    engine.compute(tokens)
                await ward.received(engine, worker)
            await ward.pass_time(10)

    await both(7)
    (finding,) = await ward.examine()
    assert finding.code == "token-mismatch"
    assert finding.subject.worker_id == 2
    engines[2].sees = lambda tokens: tokens
    await both(4)
    assert await ward.codes() == []


@run_by(play, "context")
async def test_a_probe_that_sends_nothing_is_not_missed(ward: Ward) -> None:
    """Somebody asks the same all day; the real traffic, all of it new, matches nothing either."""
    engine = ward.engine()
    await ward.hire(engine)
    for number in range(20):
        await ward.ask(prompt(5000))
        await ward.ask(prompt(number))
        engine.compute(prompt(number))
        await ward.received(engine)
        assert await ward.pass_time(10) == []


@run_by(play, "context")
async def test_prompts_that_nobody_asks_twice_may_match_nothing(ward: Ward) -> None:
    engine = ward.engine()
    engine.sees = lambda tokens: [token + 1 for token in tokens]
    await ward.hire(engine)
    for number in range(60):
        await ward.ask(prompt(number))
        engine.compute(prompt(number))
    await ward.received(engine)
    assert await ward.pass_time(60) == []


@run_by(play, "context")
async def test_a_cache_too_small_to_keep_everything_is_no_miswiring(ward: Ward) -> None:
    engine = ward.engine()
    await ward.hire(engine)
    for round_ in range(12):
        for number in range(6):
            await ward.ask(prompt(number))
            engine.compute(prompt(number))
            if number < 5:  # all but the one that was asked for last is thrown out
                engine.evict(len(engine.held))
        await ward.received(engine)
        assert await ward.pass_time(10) == [], round_


@run_by(play, "context")
async def test_blocks_that_no_engine_published_since_prove_nothing(ward: Ward) -> None:
    """Requests that are never sent anywhere: nothing is computed, so nothing can match."""
    engine = ward.engine()
    await ward.hire(engine)
    engine.send([stored([1], prompt(900)[:BLOCK])])
    await ward.received(engine)
    codes: list[str] = []
    for _ in range(4):
        for number in range(4):
            await ward.ask(prompt(number))
        codes = await ward.pass_time(40)
    assert codes == ["no-events"]  # it was given prompts, as far as is known


@run_by(play, "context")
async def test_one_prompt_under_several_adapters_is_no_mismatch(ward: Ward) -> None:
    """What the rank was sent before it was listened to is missing; that is what has to be said."""
    engine = ward.engine()
    for number in range(4):
        engine.compute(prompt(number), lora_name="a")  # before anybody listens
    await ward.hire(engine, replay=False)
    for number in range(4):
        engine.compute(prompt(number))  # the same for the base model: published, and indexed
    engine.compute(prompt(99), lora_name="a")
    await ward.received(engine)
    for round_ in range(6):
        for number in range(4):
            tokens = prompt(number)
            await ward.ask(tokens, lora_name="a")
            engine.compute(tokens, lora_name="a")
        engine.compute(prompt(200 + round_), lora_name="a")
        await ward.received(engine)
        await ward.pass_time(10)
    assert await ward.codes() == ["past-events-missing"]


@run_by(play, "context")
async def test_prompts_that_others_evict_are_no_mismatch(ward: Ward) -> None:
    """One system prompt under many salts, in a cache that keeps none of them until it comes again.

    The doctor looks while they are computed, and again before they are evicted.
    """
    engine = ward.engine()
    await ward.hire(engine)
    await ward.codes()
    for _ in range(3):
        for number in range(6):
            salt = f"tenant-{number}"
            await ward.ask(prompt(1), cache_salt=salt)
            assert await ward.codes() == []
            engine.compute(prompt(1), cache_salt=salt)
            own = repr([("cache_salt", salt)])
            for key in [key for key in engine.held if key[1] != own]:
                engine.send([removed([engine.held.pop(key)])])
            await ward.received(engine)
            assert await ward.pass_time(10) == []
