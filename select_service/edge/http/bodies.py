"""The decoders of request bodies: one per type, all for one format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from select_service.edge.codec.formats import Format
from select_service.edge.codec.json_codec import RequestDecoder

if TYPE_CHECKING:
    from select_service.edge.codec.body_limits import BodyGuard
    from select_service.settings import FieldValidation

R = TypeVar("R", bound=msgspec.Struct)


class Bodies(dict[type[msgspec.Struct], Any]):
    """The decoders of the API, by the type they produce; each is created when it is asked for."""

    def __init__(self, form: Format, validation: FieldValidation, guard: BodyGuard) -> None:
        """Decode one format.

        Args:
            form: the format of bodies.
            validation: what happens to unknown fields.
            guard: the limits of bodies.
        """
        super().__init__()
        self._form, self._validation, self._guard = form, validation, guard

    if TYPE_CHECKING:

        def __getitem__(self, kind: type[R]) -> RequestDecoder[R]: ...

    def __missing__(self, kind: type[R]) -> RequestDecoder[R]:
        decoder: Any
        if self._form is Format.JSON:
            decoder = RequestDecoder(kind, self._validation, self._guard)
        else:
            from select_service.edge.codec.msgpack_codec import (
                MsgpackDecoder,  # see `lazy_imports.py`
            )

            decoder = MsgpackDecoder(kind, self._validation, self._guard)
        self[kind] = decoder
        return decoder  # type: ignore[no-any-return]  # one of two with the same methods
