"""Reads the prompt out of the body of an OpenAI request: tokens, or what an engine tokenizes.

Only what selecting needs is looked at; the engine judges the rest. A body that is no JSON object is
refused, as the engine would refuse it.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from indexer.core.packing import pack_tokens
from indexer.types import HASH_BYTES
from select_service.errors import InvalidJson, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

OBJECTIVE_HEADER: Final = "x-gateway-inference-objective"
"""Names the priority class of a request."""

FAIRNESS_HEADER: Final = "x-gateway-inference-fairness-id"
"""Names the tenant of a fair share."""

NAMELESS: Final = "default"
"""The model of workers that were registered without one: they serve whatever is asked for."""

LOAD_ALONE: Final = (
    "no_body",  # the gateway sends none, or not before its headers
    "not_json",
    "other_route",  # neither completions nor chat completions
    "no_prompt",
    "batch",  # several prompts in one body
    "media",
    "engine_off",  # --epp-tokenize-timeout-s 0
    "engine_busy",  # --epp-tokenize-calls-max
    "engine_timeout",
    "engine_failed",
    "engine_refused",  # the engine says that the prompt is at fault, as it will again
    "no_engine",  # none that may be asked
)
"""Why a prompt was placed by load alone."""

_BLOCKS_MAX: Final = 1 << 16
"""Made-up hashes of a prompt without tokens; its length is counted beyond them, too."""

BYTES_PER_TOKEN: Final = 4
"""Of English text, about; by it a prompt without tokens is estimated."""

_ROUTE: Final = "/completions"
"""How the paths of completions and of chat completions end."""

_Tokens = list[Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]]
_FOR_CHAT: Final = (
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)
"""Members of a chat completion that change its tokens; vLLM's /tokenize takes them by these names.
"""


class _Body(Struct):
    model: str | None = None
    prompt: Raw = Raw()
    messages: Raw = Raw()
    cache_salt: str | None = None
    add_generation_prompt: Raw = Raw()
    continue_final_message: Raw = Raw()
    add_special_tokens: Raw = Raw()
    chat_template: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    tools: Raw = Raw()


class _Part(Struct):
    type: str = "text"


class _Message(Struct):
    content: str | list[_Part | str] | None = None


_BODIES: Final = msgspec.json.Decoder(_Body)
_PROMPTS: Final = msgspec.json.Decoder(str | list[_Tokens | int | str])
_TOKENS: Final = msgspec.json.Decoder(_Tokens)
_MESSAGES: Final = msgspec.json.Decoder(list[_Message])


class PromptBody(Struct, frozen=True, kw_only=True):
    """What a body says about its prompt; with neither tokens nor a text it is placed by load."""

    model: str | None = None
    cache_salt: str | None = None
    token_ids: bytes | None = None
    """Packed: unsigned, four bytes each, little-endian."""
    text: bytes | None = None
    """The body of a request to an engine's /tokenize."""
    length: int = 1
    """Tokens, estimated unless `token_ids` are there."""
    reason: str = ""
    """Why there are neither tokens nor a text; one of `LOAD_ALONE`."""


def read_body(body: bytes, path: str, content_type: str) -> PromptBody:
    """Read a whole body. O(bytes), without building what it skips.

    Args:
        body: as the client sent it.
        path: of the request, with its query; "": not known.
        content_type: "": not known.

    Raises:
        InvalidJson: it says it is JSON, and is no JSON object.
        InvalidRequest: it is no object, or `model` or `cache_salt` is no text.
    """
    length = _estimate(len(body))
    if not body:
        return PromptBody(reason="no_body")
    if content_type and "json" not in content_type.lower():
        return PromptBody(length=length, reason="not_json")
    found = _decoded(body)
    known = PromptBody(model=found.model, cache_salt=found.cache_salt, length=length)
    if path and not path.partition("?")[0].rstrip("/").endswith(_ROUTE):
        return replace(known, reason="other_route")
    if found.messages:
        return _chat(found, known)
    if found.prompt:
        return _completion(found, known)
    return replace(known, reason="no_prompt")


def model_to_serve(
    asked: str | None, is_served: Callable[[str], bool], served: Callable[[], Iterable[str]]
) -> str:
    """Return the model in whose partition a request is placed.

    Args:
        asked: what the body names.
        is_served: whether a model has workers.
        served: the models with workers; called for bodies that name none.
    """
    if asked is not None and is_served(asked):
        return asked
    if is_served(NAMELESS):
        return NAMELESS
    return min(served(), default=NAMELESS) if asked is None else asked


def unknown_hashes(length: int, block_size: int) -> bytes:
    """Return made-up block hashes of a prompt whose tokens are not known.

    No rank holds them, so the prompt counts by its length and matches nothing.

    Args:
        length: of the prompt, in tokens.
        block_size: of the workers.
    """
    return os.urandom(min(length // block_size, _BLOCKS_MAX) * HASH_BYTES)


def _decoded(body: bytes) -> _Body:
    try:
        return _BODIES.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body of the request: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"the body of the request is not JSON: {error}") from None


def _chat(found: _Body, known: PromptBody) -> PromptBody:
    try:
        messages = _MESSAGES.decode(found.messages)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return replace(known, reason="no_prompt")
    for message in messages:
        if isinstance(message.content, list) and any(map(_is_media, message.content)):
            return replace(known, reason="media")
    members = {"messages": found.messages}
    members |= {name: raw for name in _FOR_CHAT if (raw := getattr(found, name))}
    return replace(known, text=_asked(found, members), length=_estimate(len(found.messages)))


def _is_media(part: _Part | str) -> bool:
    return isinstance(part, _Part) and part.type != "text"


def _completion(found: _Body, known: PromptBody) -> PromptBody:
    try:
        if tokens := _TOKENS.decode(found.prompt):
            return replace(known, token_ids=pack_tokens(tokens))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # no tokens
    try:
        prompt = _PROMPTS.decode(found.prompt)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return replace(known, reason="no_prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str):
        members = {"prompt": Raw(msgspec.json.encode(prompt))}
        if found.add_special_tokens:
            members["add_special_tokens"] = found.add_special_tokens
        length = _estimate(len(prompt.encode("utf-8", "surrogatepass")))
        return replace(known, text=_asked(found, members), length=length)
    if any(isinstance(one, int) for one in prompt):
        return _of_one(known, prompt)
    return replace(known, reason="batch" if prompt else "no_prompt")


def _of_one(known: PromptBody, prompt: list[list[int] | int | str]) -> PromptBody:
    """Return the tokens of a batch of one, or refuse what are no tokens."""
    try:
        return replace(known, token_ids=pack_tokens(msgspec.convert(prompt, _Tokens)))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"prompt: {error}", field="prompt") from None


def _asked(found: _Body, members: dict[str, Raw]) -> bytes:
    if found.model is not None:
        members["model"] = Raw(msgspec.json.encode(found.model))
    return msgspec.json.encode(members)


def _estimate(size: int) -> int:
    return max(1, math.ceil(size / BYTES_PER_TOKEN))
