"""Encodes answers in JSON and in MessagePack: a writer for each.

The long parts of an answer are hashes. They stay packed, as in a prompt, and become numbers only
here; those of a booking are usually copied from the body it came with (`json_codec.py`).
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import msgspec
import numpy as np
import orjson

from indexer.types import HASH_BYTES, U64_MASK
from select_service.edge.codec.formats import Format
from select_service.edge.codec.responses import ONLY_JSON, VARY, Response, Status
from select_service.errors import ServiceError, problem, retry_after, retry_after_header

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from indexer.errors import IndexerError
    from indexer.types import PackedHashes

ECHOED: Final = "sequence_hashes"
"""The member of a booking's body that its answer repeats."""

_OPENS: Final = f'"{ECHOED}":['.encode()
_ECHOED_BYTES_MAX: Final = 1 << 16  # retained until the next is read
_BLANK, _LINE_FEED, _RETURN, _TAB = b" \n\r\t"
_ZERO: Final = bytes(HASH_BYTES)
_ARRAYS: Final = orjson.OPT_SERIALIZE_NUMPY
_SIGNED: Final = np.dtype("<i8")  # of packed hashes, whatever the machine's own order
_POSITIVE: Final = bytes(range(128))  # possible highest bytes of a non-negative signed number


show_hashes = cast("Callable[[PackedHashes], list[int]]", partial(array, "q"))
"""Puts hashes into an answer: encoded as signed numbers in JSON, packed in MessagePack."""


class Echo:
    """The hashes read last, with their text in the body if an answer would print them the same way.

    A booking's answer repeats its hashes, usually before anything else is read, so that nothing
    needs to be printed.
    """

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: tuple[PackedHashes, msgspec.Raw] = b"", msgspec.Raw(b"[]")

    def note(self, packed: PackedHashes, text: bytes) -> None:
        """Remember hashes and their text in an answer."""
        self.last = packed, msgspec.Raw(text)

    def note_in(self, body: bytes, packed: object) -> None:
        """Remember hashes with their text in a flat body, if an answer would print the same.

        In such a body nothing else can look like that member, as strings contain no quotes. Half
        the cost of printing.
        """
        opening = body.find(_OPENS) + len(_OPENS) - 1
        if not isinstance(packed, bytes) or opening < len(_OPENS):
            return
        text = body[opening : body.find(b"]", opening) + 1]
        if (
            len(text) > _ECHOED_BYTES_MAX
            or _BLANK in text
            or _LINE_FEED in text
            or _RETURN in text
            or _TAB in text
            or packed.find(_ZERO) >= 0  # may be written as -0
        ):
            return
        minuses = len(text) - len(text.replace(b"-", b""))  # takes half the time of `count`
        negative = len(packed[HASH_BYTES - 1 :: HASH_BYTES].translate(None, _POSITIVE))
        if minuses == negative:
            self.note(packed, text)


echo: Final = Echo()


def _in_json(shown: object) -> object:
    if type(shown) is not array:
        return _packed_in(shown)  # which refuses it
    packed = shown.tobytes()
    if packed == echo.last[0]:
        return echo.last[1]
    # orjson refuses numbers in another order than the machine's, or in old versions misprints them
    signed = np.frombuffer(packed, _SIGNED).astype(np.int64, copy=False)
    return msgspec.Raw(orjson.dumps(signed, option=_ARRAYS))


def _packed_in(shown: object) -> PackedHashes:
    """Encode types unknown to the encoders; anything else is a bug, and reported."""
    if isinstance(shown, array):
        return shown.tobytes()
    raise TypeError(f"no form for {type(shown).__name__}")


encode: Final = msgspec.json.Encoder(enc_hook=_in_json).encode
encode_msgpack: Final = msgspec.msgpack.Encoder(enc_hook=_packed_in).encode


def encode_capped(answer: object) -> bytes:
    """Encode an answer with numbers beyond MessagePack's range, which are clamped.

    Only sums can be that large (two prompts of 2^64-1 tokens each), so this need not be fast.
    """
    plain = msgspec.to_builtins(answer, enc_hook=_plain_in, builtin_types=(bytes,))
    return encode_msgpack(_capped(plain))


def _plain_in(part: object) -> object:
    """Convert what `to_builtins` does not know; encoded parts are decoded again."""
    return msgspec.msgpack.decode(part) if isinstance(part, msgspec.Raw) else _packed_in(part)


def _capped(value: object) -> object:
    if isinstance(value, dict):
        return {name: _capped(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_capped(one) for one in value]
    return min(max(value, -(1 << 63)), U64_MASK) if isinstance(value, int) else value


class Writer:
    """Encodes answers in one format."""

    __slots__ = ("_done", "_form", "_headers", "encode")

    def __init__(
        self,
        encode: Callable[[object], bytes],
        headers: tuple[tuple[bytes, bytes], ...],
        form: Format = Format.JSON,
    ) -> None:
        self.encode = encode
        self._headers = headers
        self._form = form
        self._done = encode(Status())

    def reply(self, answer: object, status: int = 200, warning: str | None = None) -> Response:
        """Encode an answer."""
        try:
            body = self.encode(answer)
        except OverflowError:  # in MessagePack, of sums beyond 64 bits
            body = encode_capped(answer)
        if warning is None:
            return Response(status, body, self._headers)
        return Response(status, body, (*self._headers, (b"warning", warning.encode())))

    def written(self, part: object) -> msgspec.Raw:
        """Encode part of a long answer; the encoder of the whole copies it verbatim."""
        try:
            return msgspec.Raw(self.encode(part))
        except OverflowError:
            return msgspec.Raw(encode_capped(part))

    def reply_listing(self, name: str, items: AsyncIterator[object], count: int) -> Response:
        """Encode an object whose only member is a long list, item by item.

        Args:
            name: of the member.
            items: of the list.
            count: how many there are.
        """
        return Response(200, b"", self._headers, stream=self._list(name, items, count))

    async def _list(
        self, name: str, items: AsyncIterator[object], count: int
    ) -> AsyncIterator[bytes]:
        is_json = self._form is Format.JSON
        if is_json:
            yield b'{"%b":[' % name.encode()
        else:
            yield b"\x81" + self.encode(name) + b"\xdd" + count.to_bytes(4, "big")
        comma = b""
        async for item in items:
            yield comma + bytes(self.written(item))
            comma = b"," if is_json else b""
        if is_json:
            yield b"]}"

    def done(self) -> Response:
        """Return the answer that only confirms."""
        return Response(200, self._done, self._headers)

    def refusal(self, error: ServiceError | IndexerError, warning: str | None = None) -> Response:
        """Encode an error."""
        if not isinstance(error, ServiceError):
            return self.reply({"error": str(error), "code": error.code}, error.status, warning)
        status, body = problem(error)
        response = self.reply(body, status, warning)
        seconds = retry_after(error)
        if seconds is not None:
            response.headers += (retry_after_line(seconds),)
        return response


def retry_after_line(seconds: float) -> tuple[bytes, bytes]:
    """Return the header that says when to retry."""
    return b"retry-after", b"%d" % retry_after_header(seconds)


JSON_WRITER: Final = Writer(encode, ONLY_JSON)


def msgpack_writer(name: bytes) -> Writer:
    """Return a writer that uses this media type, by which the client knows msgpack."""
    return Writer(encode_msgpack, ((b"content-type", name), VARY), Format.MSGPACK)
