"""Reads the prompt of a request to a Serve deployment, in whatever shape it comes.

Calls of handles carry tokens or hashes as keywords or in their first argument; Ray Serve LLM's apps
carry OpenAI bodies, as models or namespaces. `routing.py` calls it, and tokenizes text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_TOKENS: Final = ("token_ids", "prompt_token_ids", "request_token_ids", "prompt", "input_ids")
"""Names under which tokens may appear; `request_token_ids` comes from Ray Serve LLM's own
router."""

_HASHES: Final = ("block_hashes", "sequence_hashes", "isl_tokens")
_LENGTHS: Final = ("expected_output_tokens", "max_completion_tokens", "max_tokens")
_TEXTS: Final = ("messages", "prompt")
_ALIKE: Final = ("cache_salt", "lora_name")  # the same name everywhere
_ARRAYS: Final = ("array", "numpy", "torch")
_HANDLES: Final = ("ray.actor", "ray.serve.handle")  # these have an attribute of every name
_MISSING: Final = object()


class RequestPrompt:
    """A prompt as far as a request reveals it.

    Attributes:
        fields: of POST /select_and_reserve; without tokens and hashes if there are none.
        payload: the object with text that may be tokenized, or None.
    """

    __slots__ = ("fields", "payload")

    def __init__(self, fields: dict[str, Any], payload: object = None) -> None:
        self.fields = fields
        self.payload = payload

    @property
    def is_known(self) -> bool:
        """Whether it has tokens or hashes to select by."""
        return "token_ids" in self.fields or "block_hashes" in self.fields


def read_prompt(args: Iterable[object], kwargs: Mapping[str, object]) -> RequestPrompt:
    """Read the prompt of a call: first from the keywords, then from any argument.

    Args:
        args: positional arguments of the call.
        kwargs: its keywords.
    """
    holders = [kwargs, *args, *kwargs.values()]
    fields: dict[str, Any] = {}
    _read_output(holders, fields)
    for holder in holders:
        tokens = next((t for t in map(_tokens, _all(holder, _TOKENS)) if t is not None), None)
        if tokens is not None:
            fields["token_ids"] = tokens
            return RequestPrompt(fields)
        if _given(holder, "block_hashes"):
            fields |= {name: _get(holder, name) for name in _HASHES if _given(holder, name)}
            return RequestPrompt(fields)
    for holder in holders:
        if any(isinstance(one, str | list) and one for one in _all(holder, _TEXTS)):
            return RequestPrompt(fields, holder)
    return RequestPrompt(fields)


def _read_output(holders: Iterable[object], fields: dict[str, Any]) -> None:
    for holder in holders:
        for name in _ALIKE:
            one = _get(holder, name)
            if isinstance(one, str) and one:
                fields.setdefault(name, one)
        for one in _all(holder, _LENGTHS):
            if isinstance(one, int) and one > 0:
                fields.setdefault("expected_output_tokens", one)


def _all(holder: object, names: Iterable[str]) -> Iterator[object]:
    return (one for name in names if (one := _get(holder, name)) is not _MISSING)


def _given(holder: object, name: str) -> bool:
    one = _get(holder, name)
    return one is not None and one is not _MISSING


def _get(holder: object, name: str) -> object:
    if isinstance(holder, Mapping):
        return holder.get(name, _MISSING)
    if isinstance(holder, str | bytes | int | float | list | tuple | None):
        return _MISSING
    if type(holder).__module__ in _HANDLES:
        return _MISSING
    return getattr(holder, name, _MISSING)


def _tokens(value: object) -> Sequence[int] | bytes | None:
    """Return tokens if the value is some: packed, a sequence of numbers, an array or a tensor."""
    if isinstance(value, bytes) and value:
        return value
    if isinstance(value, str | Mapping):
        return None
    if type(value).__module__ in _ARRAYS:
        value = value.tolist()  # type: ignore[attr-defined]
    if isinstance(value, Sequence) and value and type(value[0]) is int:
        return value
    return None
