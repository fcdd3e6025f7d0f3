"""Applies chat templates and tokenizes with Hugging Face's `transformers` (extra `gateway`)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import msgspec

from select_service.client import MissingPackage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_RESERVED: Final = frozenset(("chat_template", "conversation", "messages", "tokenize", "tools"))
"""Names that a request may not give to its template; engines refuse them, too."""


class HuggingFaceTokenizer:
    """The tokenizers of some models: `Gateway(client, tokenizer=HuggingFaceTokenizer(…))`.

    A tokenizer is loaded when its model is first asked for; until then prompts of that model are
    placed by load alone, or call `load` before. Content of several parts is joined by newlines, as
    vLLM does for templates that take a text.
    """

    def __init__(
        self,
        tokenizers: str | Mapping[str, str],
        *,
        from_pretrained: Callable[[str], Any] | None = None,
    ) -> None:
        """Load nothing yet.

        Args:
            tokenizers: a name on the Hub or a folder, for all models; or one for each model name
                under which workers are registered.
            from_pretrained: loads one; default: that of `transformers.AutoTokenizer`.

        Raises:
            MissingPackage: `transformers` is not installed.
        """
        self._named = tokenizers
        self._from_pretrained = from_pretrained or _of_transformers()
        self._loaded: dict[str, Any] = {}
        self._loading = threading.Lock()

    def load(self, model: str) -> Any:
        """Return the tokenizer of a model, and load it if that was not done yet.

        Raises:
            KeyError: none is named for it.
            OSError: it cannot be read.
        """
        name = self._named if isinstance(self._named, str) else self._named[model]
        with self._loading:
            if name not in self._loaded:
                self._loaded[name] = self._from_pretrained(name)
            return self._loaded[name]

    def __call__(self, model: str, prompt: Mapping[str, Any]) -> Sequence[int]:
        """Return the tokens of a prompt.

        Args:
            model: under which its workers are registered.
            prompt: the body of a request to vLLM's /tokenize: `messages`, or `prompt`, and what
                changes their tokens.

        Raises:
            ValueError: the request brings a template of its own, which is not run here.
        """
        tokenizer = self.load(model)
        if "messages" not in prompt:
            text, adds_special = prompt["prompt"], prompt.get("add_special_tokens", True)
        else:
            switches = prompt.get("chat_template_kwargs") or {}
            if prompt.get("chat_template") or _RESERVED & switches.keys():
                raise ValueError("a template that comes with the request is not run here")
            text = tokenizer.apply_chat_template(
                [_plain(one) for one in prompt["messages"]],
                tools=prompt.get("tools"),
                tokenize=False,
                **{
                    "add_generation_prompt": prompt.get("add_generation_prompt", True),
                    "continue_final_message": prompt.get("continue_final_message", False),
                    **switches,
                },
            )
            adds_special = prompt.get("add_special_tokens", False)
        found: Sequence[int] = tokenizer(text, add_special_tokens=adds_special)["input_ids"]
        return found


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates read it: its text in one piece, arguments as objects."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(
            one if isinstance(one, str) else one["text"] for one in content
        )
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_called(one) for one in plain["tool_calls"]]
    return plain


def _called(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        function["arguments"] = msgspec.json.decode(function["arguments"] or "{}")
    return {**call, "function": function}


def _of_transformers() -> Callable[[str], Any]:
    try:
        from transformers import AutoTokenizer  # seconds, and an extra
    except ImportError as error:
        raise MissingPackage(
            "tokenizers of Hugging Face need more: pip install 'jinja2>=3.1' 'transformers>=4.48'"
        ) from error
    load: Callable[[str], Any] = AutoTokenizer.from_pretrained
    return load
