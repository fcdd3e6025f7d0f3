"""Templates are applied as engines apply them: texts, parts, tools, switches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from select_service.gateway import HuggingFaceTokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}"
    "{% endfor %}{% if tools %}{{ tools | length }}{% endif %}"
    "{% if thinks %}<think>{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": "c", "tool_calls": [CALL]},
]
RENDERED: list[tuple[dict[str, Any], str]] = [
    ({"messages": CHAT}, "<user>a\nb<assistant>cRome<assistant>"),
    ({"messages": CHAT, "tools": [{}, {}]}, "<user>a\nb<assistant>cRome2<assistant>"),
    (
        {"messages": CHAT, "add_generation_prompt": False, "chat_template_kwargs": {"thinks": 1}},
        "<user>a\nb<assistant>cRome<think>",
    ),
    ({"prompt": "ab"}, "^ab"),
    ({"prompt": "ab", "add_special_tokens": False}, "ab"),
]


class Letters:
    """As much of a tokenizer as is used; a token is the number of a letter."""

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **given: Any) -> str:
        assert not tokenize
        jinja = pytest.importorskip("jinja2.sandbox")
        template = jinja.ImmutableSandboxedEnvironment().from_string(TEMPLATE)
        return str(template.render(messages=messages, **given))

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(one) for one in ("^" if add_special_tokens else "") + text]}


@pytest.mark.parametrize(("prompt", "text"), RENDERED)
def test_what_a_template_sees(prompt: dict[str, Any], text: str) -> None:
    loaded: list[str] = []

    def load(name: str) -> Letters:
        loaded.append(name)
        return Letters()

    tokenizer = HuggingFaceTokenizer({"m": "hub/m"}, from_pretrained=load)
    for _ in range(2):
        assert "".join(map(chr, tokenizer("m", prompt))) == text
    assert loaded == ["hub/m"]
    with pytest.raises(KeyError):
        tokenizer("other", prompt)


@pytest.mark.parametrize("own", [{"chat_template": "x"}, {"chat_template_kwargs": {"tools": 1}}])
def test_a_template_of_the_request_is_not_run(own: dict[str, Any]) -> None:
    tokenizer = HuggingFaceTokenizer("any", from_pretrained=lambda _: Letters())
    with pytest.raises(ValueError, match="not run here"):
        tokenizer("m", {"messages": CHAT, **own})


@pytest.mark.heavy
def test_a_tokenizer_out_of_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    letters = "^<>abcdefghijklmnopqrstuvwxyzR2\n"
    model = tokenizers.models.WordLevel({one: n for n, one in enumerate(letters)}, "^")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="^ $A", special_tokens=[("^", 0)]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE)
    fast.save_pretrained(tmp_path)
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    for prompt, text in RENDERED:
        assert "".join(letters[one] for one in tokenizer("m", prompt)) == text
