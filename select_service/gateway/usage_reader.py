"""Reads what an engine's answer tells on its way to the client: output, cached tokens, errors.

Pure. A stream of server-sent events is cut into whole events, which are passed on as they came; an
event that tells the usage to nobody but us is left out. Any other answer passes unchanged.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Struct

_END_OF_EVENT: Final = re.compile(rb"\r?\n\r?\n")
_DONE: Final = b"[DONE]"
_REFUSED: Final = 400
_BROKE: Final = 500


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Error(Struct):
    code: int | str | None = None


class _Answer(Struct):
    usage: _Usage | None = None
    choices: list[msgspec.Raw] | None = None
    error: _Error | str | None = None


_ANSWERS: Final = msgspec.json.Decoder(_Answer)


class UsageReader:
    """One answer.

    Attributes:
        output_tokens: Of the answer so far: as the engine counts, or one for each event.
        cached_tokens: Of the prompt, as the engine has found them; None: it does not tell.
        has_failed: The engine told an error, and not that the request is at fault.
    """

    def __init__(self, *, is_stream: bool, drops_usage: bool, bytes_max: int) -> None:
        """Begin with nothing.

        Args:
            is_stream: it is a stream of server-sent events.
            drops_usage: leave out the event with the usage of the whole, which has no choices.
            bytes_max: of an event or answer that are kept until its end.
        """
        self._is_stream = is_stream
        self._drops_usage = drops_usage
        self._bytes_max = bytes_max
        self._kept = bytearray()
        self._is_unread = False  # too long to be read
        self.output_tokens = 0
        self.cached_tokens: int | None = None
        self.has_failed = False

    def feed(self, piece: bytes) -> bytes:
        """Take the next bytes, and return those that go to the client now."""
        if self._is_unread:
            return piece
        self._kept += piece
        if not self._is_stream:
            if len(self._kept) > self._bytes_max:
                self._is_unread = True
                self._kept.clear()
            return piece
        out, start = bytearray(), 0
        for end in _END_OF_EVENT.finditer(self._kept):
            event = bytes(self._kept[start : end.end()])
            start = end.end()
            if self._passes(event):
                out += event
        del self._kept[:start]
        if len(self._kept) > self._bytes_max:
            self._is_unread = True
            out += self._kept
            self._kept.clear()
        return bytes(out)

    def finish(self) -> bytes:
        """Read what is left at the end, and return what still goes to the client."""
        rest = bytes(self._kept)
        self._kept.clear()
        if self._is_stream:
            return rest if rest and self._passes(rest) else b""
        self._read(rest)
        return b""

    def _passes(self, event: bytes) -> bool:
        """Read an event; tell whether it goes to the client."""
        data = b"".join(
            line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")
        )
        if not data or data == _DONE:
            return True
        if b'"usage"' not in data and b'"error"' not in data:  # almost all
            self.output_tokens += 1
            return True
        told = self._read(data)
        if told is None or told.usage is None:
            self.output_tokens += 1
            return True
        return not (self._drops_usage and told.choices == [])

    def _read(self, data: bytes) -> _Answer | None:
        try:
            told = _ANSWERS.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        self.has_failed |= told.error is not None and not _is_refusal(told.error)
        usage = told.usage
        if usage is not None:
            if usage.completion_tokens is not None:
                self.output_tokens = max(self.output_tokens, usage.completion_tokens)
            details = usage.prompt_tokens_details
            if details is not None and details.cached_tokens is not None:
                self.cached_tokens = max(0, details.cached_tokens)
        return told


def _is_refusal(error: _Error | str) -> bool:
    """Whether an error says that the request is at fault: a status of 4xx."""
    code = error.code if isinstance(error, _Error) else None
    return isinstance(code, int) and _REFUSED <= code < _BROKE
