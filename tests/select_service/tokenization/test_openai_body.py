"""What is read out of bodies: tokens, a text for an engine, or why it is neither."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.packing import unpack_tokens
from select_service.errors import InvalidJson, InvalidRequest
from select_service.tokenization.openai_body import LOAD_ALONE, PromptBody, read_body

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def read(body: object, path: str = PATH, content_type: str = "application/json") -> PromptBody:
    return read_body(msgspec.json.encode(body), path, content_type)


@pytest.mark.parametrize("prompt", [[1, 2, 4294967295], [[1, 2, 4294967295]]])
def test_token_ids_are_taken_as_they_are(prompt: object) -> None:
    found = read({"model": "m", "prompt": prompt, "cache_salt": "s"})
    assert found.token_ids is not None
    assert unpack_tokens(found.token_ids) == [1, 2, 4294967295]
    assert (found.model, found.cache_salt, found.text) == ("m", "s", None)


@pytest.mark.parametrize("prompt", ["hé", ["hé"]])
def test_a_text_is_asked_as_the_engine_wants_it(prompt: object) -> None:
    found = read({"model": "m", "prompt": prompt, "add_special_tokens": False, "n": 3})
    assert found.text is not None
    assert msgspec.json.decode(found.text) == {
        "model": "m",
        "prompt": "hé",
        "add_special_tokens": False,
    }
    assert found.length == 1


def test_a_chat_is_asked_with_all_that_changes_its_tokens() -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template": "t",
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
        "model": "m",
    }
    found = read({**fields, "temperature": 1, "stream": True}, CHAT)
    assert found.text is not None
    assert msgspec.json.decode(found.text) == fields


@pytest.mark.parametrize(
    ("body", "path", "reason"),
    [
        ({"prompt": ["a", "b"]}, PATH, "batch"),
        ({"prompt": [[1], [2]]}, PATH, "batch"),
        ({"prompt": []}, PATH, "no_prompt"),
        ({"prompt": [[]]}, PATH, "no_prompt"),
        ({"prompt": 5}, PATH, "no_prompt"),
        ({"prompt": None}, PATH, "no_prompt"),
        ({"prompt": [True]}, PATH, "no_prompt"),
        ({}, PATH, "no_prompt"),
        ({"messages": 5}, CHAT, "no_prompt"),
        ({"messages": None}, CHAT, "no_prompt"),
        ({"messages": [{"content": [{"type": "image_url"}]}]}, CHAT, "media"),
        ({"input": "x"}, "/v1/embeddings", "other_route"),
        ({"prompt": [1]}, "/v1/responses?x=/completions", "other_route"),
    ],
)
def test_the_rest_says_why(body: object, path: str, reason: str) -> None:
    found = read(body, path)
    assert (found.reason, found.text, found.token_ids) == (reason, None, None)
    assert found.length >= 1
    assert reason in LOAD_ALONE


def test_other_content_is_not_read() -> None:
    assert read_body(b"--x\r\n", PATH, "multipart/form-data; boundary=x").reason == "not_json"
    assert read_body(b"", PATH, "").reason == "no_body"


@pytest.mark.parametrize("path", [PATH + "?a=b", PATH + "/", ""])
def test_paths_may_have_more(path: str) -> None:
    assert read({"prompt": [1]}, path, "").token_ids


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"{", InvalidJson),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, InvalidJson),
        (b"[1]", InvalidRequest),
        (b'{"model": 5}', InvalidRequest),
        (b'{"prompt": [1, -1]}', InvalidRequest),
        (b'{"prompt": [4294967296]}', InvalidRequest),
    ],
)
def test_what_an_engine_would_refuse_is_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error) as found:
        read_body(data, PATH, "application/json")
    assert getattr(found.value, "status", 0) == 400


@given(st.binary(max_size=200), st.text(max_size=20), st.text(max_size=20))
def test_any_bytes_are_read_or_refused(data: bytes, path: str, content_type: str) -> None:
    try:
        found = read_body(data, path, content_type)
    except (InvalidJson, InvalidRequest):
        return
    assert found.token_ids or found.text or found.reason in LOAD_ALONE
