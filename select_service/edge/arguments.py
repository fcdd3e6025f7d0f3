"""Arguments of the embedded service: structs of `types`, or mappings with the same members.

A mapping is judged as the body of the HTTP route is, with the same messages; a member that is not
known is refused, as there is no answer to warn in. `embedded.py` takes all its arguments from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from select_service.config import FieldValidation
from select_service.edge.codec.json_codec import RequestDecoder
from select_service.edge.waves import WaveBody
from select_service.errors import ServiceError
from select_service.types.waves import SelectBatchRequest, WaveItem

__all__ = ["taken", "taken_wave"]

T = TypeVar("T", bound=msgspec.Struct)


def taken(name: str, value: object, kind: type[T]) -> T:
    """Return an argument as a struct.

    Args:
        name: of the argument.
        value: such a struct, or a mapping with its members.
        kind: of the struct.

    Raises:
        TypeError: it is neither, or has a value that no body can contain.
        InvalidField: a member has the wrong shape.
        UnknownField: there is no such member.
    """
    if isinstance(value, kind):
        return value
    request: T = _decoder(kind).decode(_body(name, value, kind)).request
    return request


def taken_wave(name: str, value: object) -> SelectBatchRequest:
    """Return a wave as `taken` does; its prompts are judged one by one.

    Raises:
        TypeError: it is neither a struct nor a mapping.
        InvalidField: a member has the wrong shape.
        UnknownField: there is no such member.
    """
    if isinstance(value, SelectBatchRequest):
        return value
    body = _decoder(WaveBody).decode(_body(name, value, SelectBatchRequest)).request
    items = []
    for at, raw in enumerate(body.requests):
        try:
            items.append(_decoder(WaveItem).decode(bytes(raw)).request)
        except ServiceError as refusal:
            inside = "" if refusal.field is None else f".{refusal.field}"
            refusal.field = f"requests[{at}]{inside}"
            raise
    rest = {one: getattr(body, one) for one in body.__struct_fields__ if one != "requests"}
    return SelectBatchRequest(requests=items, **rest)


@lru_cache
def _decoder(kind: type[T]) -> RequestDecoder[T]:
    return RequestDecoder(kind, FieldValidation.STRICT)


def _body(name: str, value: object, kind: type) -> bytes:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"`{name}` must be a {kind.__name__} or a mapping, not {type(value).__name__}"
        )
    _refuse_endless(name, value)
    try:
        return msgspec.json.encode(dict(value), enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"`{name}`: {error}") from None


def _plain(value: Any) -> object:
    """Return arrays as lists, and mappings as dicts."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):  # of NumPy, and of the module `array`
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no value of a request")


def _refuse_endless(path: str, value: Mapping[Any, Any]) -> None:
    """Refuse what JSON would turn into null: numbers that are not finite."""
    for name, one in value.items():
        if isinstance(one, Mapping):
            _refuse_endless(f"{path}.{name}", one)
        elif isinstance(one, float) and not math.isfinite(one):
            raise TypeError(f"`{path}.{name}` must be a finite number")
