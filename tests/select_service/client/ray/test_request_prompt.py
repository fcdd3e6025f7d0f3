"""Prompts are found in calls of handles and in OpenAI bodies, in every shape they have there."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from select_service.client.ray.request_prompt import read_prompt

TOKENS = [1, 2, 3]


class Handle:
    """Has everything, as a handle of Serve's."""

    __module__ = "ray.serve.handle"

    def __getattr__(self, name: str) -> str:
        return name


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ([], {"token_ids": TOKENS}),
        ([], {"prompt_token_ids": tuple(TOKENS)}),
        ([SimpleNamespace(messages=[{"role": "user"}])], {"request_token_ids": TOKENS}),
        ([{"prompt": TOKENS}], {}),
        ([SimpleNamespace(prompt=TOKENS, max_tokens=None)], {}),
        ([], {"request": {"prompt_token_ids": TOKENS}}),
        ([7, "text", None], {"token_ids": np.array(TOKENS)}),
        ([], {"token_ids": array("I", TOKENS)}),
        ([Handle()], {"token_ids": TOKENS}),
    ],
)
def test_tokens(args: list[Any], kwargs: dict[str, Any]) -> None:
    found = read_prompt(args, kwargs)
    assert list(found.fields["token_ids"]) == TOKENS
    assert found.is_known


def test_packed_tokens_are_handed_on() -> None:
    assert read_prompt([], {"token_ids": b"\1\0\0\0"}).fields["token_ids"] == b"\1\0\0\0"


def test_hashes() -> None:
    kwargs = {"block_hashes": [5, 6], "sequence_hashes": None, "isl_tokens": 32}
    found = read_prompt([], kwargs)
    assert found.fields == {"block_hashes": [5, 6], "isl_tokens": 32}
    assert found.is_known


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "hello"}]},
        SimpleNamespace(prompt="hello"),
        {"prompt": ["one", "two"]},
    ],
)
def test_text_is_for_a_tokenizer(body: object) -> None:
    found = read_prompt([body], {})
    assert not found.is_known
    assert found.payload is body


@pytest.mark.parametrize("args", [[], [{}], [None, 3], [{"prompt": ""}], [{"token_ids": []}]])
def test_nothing_there(args: list[Any]) -> None:
    found = read_prompt(args, {})
    assert not found.is_known
    assert found.payload is None


def test_what_else_a_selection_should_know() -> None:
    body = SimpleNamespace(
        prompt=TOKENS, max_tokens=9, max_completion_tokens=5, cache_salt="s", lora_name=None
    )
    fields = read_prompt([body], {}).fields
    assert fields == {"token_ids": TOKENS, "expected_output_tokens": 5, "cache_salt": "s"}
