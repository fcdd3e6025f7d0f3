"""A request is reserved, forwarded, reported and freed, whatever engine and client do."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from indexer import unpack_i64
from select_service.client import hash_prompt
from select_service.gateway import GatewayOptions
from tests.select_service.gateway.stage import (
    CHAT,
    PATIENT,
    TEXT,
    TOKENS,
    engine,
    stage,
    whole,
)
from tests.wait import PATIENCE_S, until

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = b"content-type: text/event-stream\r\n"
WORD = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
COUNTS: dict[str, Any] = {
    "completion_tokens": 40,
    "prompt_tokens_details": {"cached_tokens": 0},
}
USAGE = b"data: " + msgspec.json.encode({"choices": [], "usage": COUNTS}) + b"\n\n"
DONE = b"data: [DONE]\n\n"


async def test_an_answer_as_a_whole() -> None:
    expected = {"usage": COUNTS}
    async with stage() as at, engine(pieces=[msgspec.json.encode(expected)]) as one:
        at.register(1, one)
        at.store(1, TOKENS)
        answer = await at.ask(ASK | {"temperature": 0}, CHAT, authorization="Bearer t", host="h")
        (path, head, body) = one.asked[0]
        assert (answer.status, path, body) == (200, CHAT, ASK | {"temperature": 0})
        assert "authorization: Bearer t" in head
        assert head.lower().count("host: ") == 1
        assert "x-data-parallel-rank" not in head
        assert at.loads() == [(1, 8, 2, 1)], "32 of 40 are taken to be cached"
        assert msgspec.json.decode(await whole(answer)) == expected
        await at.freed(completed=1)
        assert at.gateway.stats()["prompts"] == {"tokenized": 1}
        assert at.driver.trust().ranks[0].samples == 1, "the engine's count was compared"


async def test_a_stream_is_reported_while_it_lasts() -> None:
    async with stage() as at, engine(head=STREAM, pieces=[WORD] * 40, is_silent=True) as one:
        at.register(1, one)
        answer = await at.ask(ASK | {"stream": True}, CHAT)
        assert one.asked[0][2]["stream_options"] == {"include_usage": True}
        pieces = aiter(answer)
        seen = b""
        while seen.count(WORD) < 40:
            seen += await anext(pieces)
        await until(lambda: at.loads() == [(1, 0, 5, 1)], at.loads)
        await answer.aclose()  # the client has left
        await at.freed(cancelled=1)
        await until(lambda: one.left)
        assert at.gateway.traffic.left == 1
        await pieces.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("asks", [False, True])
async def test_usage_is_kept_from_a_client_that_has_not_asked(asks: bool) -> None:
    async with stage() as at, engine(head=STREAM, pieces=[WORD, USAGE, DONE]) as one:
        at.register(1, one)
        at.store(1, TOKENS)
        options = {"stream_options": {"include_usage": True}} if asks else {}
        answer = await at.ask(ASK | {"stream": True} | options, CHAT)
        assert await whole(answer) == (WORD + USAGE + DONE if asks else WORD + DONE)
        await at.freed()
        assert at.driver.trust().ranks[0].samples == 1


@pytest.mark.parametrize(
    "fault", [{"status": 503}, {"pieces": [], "breaks": True}, {"url": "http://127.0.0.1:9"}]
)
async def test_another_worker_is_tried_before_the_first_byte(fault: dict[str, Any]) -> None:
    url = fault.pop("url", None)
    async with stage() as at, engine(**fault) as bad, engine() as good:
        if url is not None:
            bad.url = url
        at.register(1, bad)
        at.register(2, good)
        for _ in range(8):  # whoever is drawn first
            answer = await at.ask(ASK, CHAT)
            assert (answer.status, await whole(answer)) == (200, b'{"id": "1"}')
            if at.gateway.traffic.retries:
                break
        assert at.gateway.traffic.retries == 1
        await at.freed(failed=1, completed=at.gateway.traffic.requests)


async def test_without_another_worker_the_failure_is_reported() -> None:
    async with stage() as at, engine(status=503, pieces=[b'{"error": {}}']) as one:
        at.register(1, one)
        answer = await at.ask(ASK, CHAT)
        assert (answer.status, await whole(answer)) == (503, b'{"error": {}}'), "in its words"
        one.pieces, one.breaks = [], True
        answer = await at.ask(ASK, CHAT)
        error = msgspec.json.decode(await whole(answer))["error"]
        assert (answer.status, error["type"], error["code"]) == (
            502,
            "server_error",
            "engine_failed",
        )
        await at.freed()
        assert len(one.asked) == 2


async def test_a_refusal_of_the_engine_goes_to_the_client() -> None:
    async with stage() as at, engine(status=400, pieces=[b'{"error": {}}']) as one, engine() as two:
        at.register(1, one)
        at.register(2, one)
        answer = await at.ask(ASK, CHAT)
        assert (answer.status, len(one.asked), len(two.asked)) == (400, 1, 0)
        assert await whole(answer) == b'{"error": {}}'
        await at.freed(completed=1)


async def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    async with stage() as at, engine(head=STREAM, pieces=[WORD], breaks=True) as one:
        at.register(1, one)
        stream = await whole(await at.ask(ASK | {"stream": True}, CHAT))
        assert stream.startswith(WORD)
        assert b'"code":"engine_failed"' in stream
        await at.freed(failed=1)
        assert at.gateway.traffic.broken == 1


async def test_a_silent_engine_is_not_asked_twice() -> None:
    options = msgspec.structs.replace(PATIENT, engine_silence_s=0.05)
    async with stage(options) as at, engine(pieces=[], is_silent=True) as one:
        at.register(1, one)
        at.register(2, one)
        answer = await at.ask(ASK, CHAT)
        assert answer.status == 504
        assert len(one.asked) == 1, "it may be at work"
        await at.freed()


async def test_who_leaves_before_the_first_byte_frees_too() -> None:
    async with stage() as at, engine(pieces=[], is_silent=True) as one:
        at.register(1, one)
        asking = asyncio.ensure_future(at.ask(ASK, CHAT))
        await until(lambda: one.asked)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await at.freed(cancelled=1)
        await until(lambda: one.left)


async def test_the_rank_is_the_reserved_one() -> None:
    async with stage() as at, engine() as one:
        ranks = {"0": "tcp://127.0.0.1:9", "1": "tcp://127.0.0.1:10"}
        at.register(1, one, data_parallel_size=2, kv_events_endpoints=ranks)
        answer = await at.ask(ASK, CHAT, x_data_parallel_rank="7")
        found = [line for line in one.asked[0][1].lower().splitlines() if "data-parallel" in line]
        assert found in (["x-data-parallel-rank: 0"], ["x-data-parallel-rank: 1"])
        await answer.aclose()
        await at.freed()


@pytest.mark.parametrize(
    ("body", "path", "status", "code"),
    [
        ([], CHAT, 400, "invalid_request"),
        ({"model": "other", "prompt": [1]}, TEXT, 404, "unknown_model"),
        ({"model": 1}, CHAT, 400, "invalid_request"),
        ({"model": "m", "prompt": "x" * 200}, TEXT, 413, "body_too_large"),
    ],
)
async def test_errors_have_the_form_of_openai(body: Any, path: str, status: int, code: str) -> None:
    options = msgspec.structs.replace(PATIENT, body_bytes_max=200)
    async with stage(options) as at, engine() as one:
        at.register(1, one)
        answer = await at.ask(body, path)
        error = msgspec.json.decode(await whole(answer))["error"]
        assert (answer.status, error["code"]) == (status, code)
        assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
        assert error["message"]
        assert not one.asked


async def test_a_client_that_comes_while_all_are_busy_gets_a_retry_after() -> None:
    async with stage() as at, engine() as one:
        at.register(1, one, max_inflight=1, max_queued=0)
        first = await at.ask(ASK, CHAT)
        answer = await at.ask(ASK, CHAT)
        headers = dict(answer.headers)
        assert answer.status in (429, 503)
        assert int(headers["retry-after"]) >= 1
        await first.aclose()
        await at.freed()


async def test_adapters_images_and_salts() -> None:
    listed = [{"id": "m"}, {"id": "sql", "parent": "m"}]
    async with stage() as at, engine(listed=listed) as one:
        at.register(1, one)
        request = at.driver.core.lifecycle.bookings
        image = [{"type": "image_url", "image_url": {"url": "data:"}}]
        for body, source in (
            ({"model": "sql", "prompt": TOKENS, "cache_salt": "s"}, "token_ids"),
            ({"model": "m", "messages": [{"role": "user", "content": image}]}, "load_alone"),
            ({"model": "m", "prompt": ["a", "b"]}, "load_alone"),
        ):
            answer = await at.ask(body, CHAT if "messages" in body else TEXT)
            assert (answer.status, at.gateway.traffic.prompts[source] > 0) == (200, True)
            assert [one for one, *_ in at.loads()] == [1]
            assert request.newest(2)
            await answer.aclose()
            await at.freed()
        assert at.gateway.traffic.load_alone == {"media": 1, "batch": 1}
        answer = await at.gateway.models()
        assert msgspec.json.decode(await whole(answer))["data"] == listed


async def test_what_is_reserved_for_an_adapter_is_named_after_it() -> None:
    options = GatewayOptions(adapters={"sql": "m"}, tokenize_timeout_s=PATIENCE_S)
    async with stage(options) as at, engine() as one:
        at.register(1, one)
        body = {"model": "sql", "prompt": TOKENS, "max_tokens": 9, "cache_salt": "s"}
        async with at.gateway.reserve_openai(body, path=TEXT) as reserved:
            named = hash_prompt(TOKENS, 16, lora_name="sql", cache_salt="s")["sequence_hashes"]
            assert isinstance(named, bytes)
            assert reserved.selection.sequence_hashes == unpack_i64(named)
            assert reserved.selection.model_name == "m"
        await at.freed()


async def test_a_tokenizer_of_ones_own() -> None:
    seen: list[tuple[str, Any]] = []

    def encode(model: str, prompt: Any) -> list[int]:
        seen.append((model, prompt))
        return TOKENS if "prompt" in prompt else []

    async with stage(tokenizer=encode) as at, engine() as one:
        at.register(1, one)
        for number in range(2):
            async with at.gateway.reserve_openai({"model": "m", "prompt": "x"}, path=TEXT) as r:
                assert r.selection.isl_tokens == len(TOKENS)
            assert len(seen) == 1, number
        assert seen == [("m", {"model": "m", "prompt": "x"})]
        async with at.gateway.reserve_openai(ASK):
            pass
        assert at.gateway.traffic.load_alone == {"tokenizer_failed": 1}
        await at.freed()
