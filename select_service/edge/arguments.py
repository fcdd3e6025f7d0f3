"""Arguments of the embedded service: structs of `types`, or mappings with the same members.

A mapping is judged as the body of the HTTP route is, with the same messages; a member that is not
known is refused, as there is no answer to warn in. The long lists of a prompt may be packed, as in
a struct. `embedded.py` takes all its arguments from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from inspect import signature
from numbers import Integral, Real
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from select_service.edge.batch_runner import BatchBody
from select_service.edge.codec.json_codec import HASHES, TOKENS, RequestDecoder
from select_service.errors import ServiceError
from select_service.settings import FieldValidation
from select_service.types import PromptFields
from select_service.types.batches import SelectBatchItem, SelectBatchRequest

T = TypeVar("T", bound=msgspec.Struct)

_LONG: Final = (TOKENS, *HASHES)
"""Members of a prompt that may be packed; the core checks what is."""

_SCALARS: Final[Mapping[str, tuple[type, type]]] = {
    "str": (str, str), "Outcome": (str, str), "int": (Integral, int), "float": (Real, float)
}  # fmt: skip
"""What is taken, and what that becomes: no codec knows the numbers of NumPy."""
_TOLD: Final = {"str": "a str", "Outcome": "a str", "int": "an int", "float": "a float"}
_MISSING: Final = object()


class Scalar(NamedTuple):
    """An argument that is one text or number."""

    name: str
    position: int  # behind `self`
    type_name: str
    is_optional: bool


def scalars_of(method: Callable[..., object]) -> list[Scalar]:
    """Return the scalar arguments of a method, by its annotations."""
    found = []
    for at, (name, one) in enumerate(signature(method).parameters.items()):
        type_name, *more = str(one.annotation).split(" | ")
        if type_name in _SCALARS:
            found.append(Scalar(name, at - 1, type_name, more == ["None"]))
    return found


def plain_scalars(scalars: Sequence[Scalar], args: list[Any], named: dict[str, Any]) -> None:
    """Make plain texts and numbers of scalars, in their place.

    Raises:
        TypeError: naming an argument of another type: an id that is None names nothing.
    """
    for name, at, type_name, is_optional in scalars:
        value = args[at] if at < len(args) else named.get(name, _MISSING)
        taken_type, plain_type = _SCALARS[type_name]
        if type(value) is plain_type or value is _MISSING or (value is None and is_optional):
            continue
        if not isinstance(value, taken_type):
            raise TypeError(f"`{name}` must be {_TOLD[type_name]}, not {type(value).__name__}")
        if at < len(args):
            args[at] = plain_type(value)
        else:
            named[name] = plain_type(value)


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
    value, packed = _split(value) if issubclass(kind, PromptFields) else (value, {})
    request: T = _decoder(kind).decode(_body(name, value, kind)).request
    return _with(request, packed)


def taken_or_none(name: str, value: object, kind: type[T]) -> T | None:
    """Return an argument as `taken` does, which may also be None."""
    return None if value is None else taken(name, value, kind)


def taken_batch(name: str, value: object) -> SelectBatchRequest:
    """Return a batch as `taken` does; its prompts are judged one by one.

    Raises:
        TypeError: it is neither a struct nor a mapping.
        InvalidField: a member has the wrong shape.
        UnknownField: there is no such member.
    """
    if isinstance(value, SelectBatchRequest):
        return value
    prompts = value.get("requests") if isinstance(value, Mapping) else None
    split: list[tuple[object, dict[str, bytes]]] = []
    if isinstance(prompts, list | tuple):
        split = [_split(one) for one in prompts]
        value = {**value, "requests": [rest for rest, _ in split]}  # type: ignore[dict-item]
    body = _decoder(BatchBody).decode(_body(name, value, SelectBatchRequest)).request
    items = []
    for at, raw in enumerate(body.requests):
        try:
            item = _decoder(SelectBatchItem).decode(bytes(raw)).request
            items.append(_with(item, split[at][1] if split else {}))
        except ServiceError as refusal:
            inside = "" if refusal.field is None else f".{refusal.field}"
            refusal.field = f"requests[{at}]{inside}"
            raise
    rest = {one: getattr(body, one) for one in body.__struct_fields__ if one != "requests"}
    return SelectBatchRequest(requests=items, **rest)


@lru_cache
def _decoder(kind: type[T]) -> RequestDecoder[T]:
    return RequestDecoder(kind, FieldValidation.STRICT)


def _split(value: object) -> tuple[object, dict[str, bytes]]:
    """Return a prompt without its packed lists, and those."""
    if not isinstance(value, Mapping):
        return value, {}
    packed = {
        name: bytes(one) for name in _LONG if isinstance(one := value.get(name), bytes | bytearray)
    }
    if not packed:
        return value, {}
    return {name: one for name, one in value.items() if name not in packed}, packed


def _with(request: T, packed: Mapping[str, bytes]) -> T:
    for name, one in packed.items():
        setattr(request, name, one)
    return request


def _body(name: str, value: object, kind: type) -> bytes:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"`{name}` must be a {kind.__name__} or a mapping, not {type(value).__name__}"
        )
    _refuse_foreign(name, value)
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


def _refuse_foreign(path: str, value: object) -> None:
    """Refuse what JSON would turn into something else: numbers that are not finite, and bytes."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            is_long = name in _LONG and isinstance(one, list | tuple)
            if not is_long:  # a million numbers, which the decoder judges
                _refuse_foreign(f"{path}.{name}", one)
    elif isinstance(value, list | tuple):
        for at, one in enumerate(value):
            _refuse_foreign(f"{path}[{at}]", one)
    elif isinstance(value, bytes | bytearray):
        raise TypeError(f"`{path}`: bytes are no value of a request")
    elif isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"`{path}` must be a finite number")
