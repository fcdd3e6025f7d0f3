"""One request at the worker that is reserved for it, from its first byte to its end.

What comes is passed on as it comes; the service learns of the first bytes, of output as it fills
blocks, of what the engine had cached, and of the end, whatever causes it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Self

import httpx
import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from select_service.client import Reservation
    from select_service.gateway.options import GatewayOptions, GatewayTraffic
    from select_service.types.reservations import Outcome


_TOO_MANY: Final = 429


class EngineFailed(Exception):
    """The chosen worker did not answer; the text says why."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 502,
        code: str = "engine_failed",
        may_retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.may_retry = may_retry


def error_body(
    status: int, message: str, code: str | None, param: str | None = None
) -> dict[str, object]:
    """Return an error as OpenAI's clients read it."""
    if status == _TOO_MANY:
        kind = "rate_limit_error"
    else:
        kind = "server_error" if status >= _BROKE else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


# Reads what an engine's answer reports on its way to the client: output, cached tokens, errors.
# Pure. A stream of server-sent events is cut into whole events, which are passed on as they came;
# an event that shows the usage to us alone is left out. Any other answer passes unchanged.

_END_OF_EVENT: Final = re.compile(rb"\r?\n\r?\n")
_DONE: Final = b"[DONE]"


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
        cached_tokens: Of the prompt, as the engine has found them; None: it does not report it.
        has_failed: The engine reported an error, and not that the request is at fault.
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
        """Read an event; return whether it goes to the client."""
        data = b"".join(
            line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")
        )
        if not data or data == _DONE:
            return True
        if b'"usage"' not in data and b'"error"' not in data:  # almost all
            self.output_tokens += 1
            return True
        answer = self._read(data)
        if answer is None or answer.usage is None:
            self.output_tokens += 1
            return True
        return not (self._drops_usage and answer.choices == [])

    def _read(self, data: bytes) -> _Answer | None:
        try:
            answer = _ANSWERS.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        self.has_failed |= answer.error is not None and not _is_refusal(answer.error)
        usage = answer.usage
        if usage is not None:
            if usage.completion_tokens is not None:
                self.output_tokens = max(self.output_tokens, usage.completion_tokens)
            details = usage.prompt_tokens_details
            if details is not None and details.cached_tokens is not None:
                self.cached_tokens = max(0, details.cached_tokens)
        return answer


def _is_refusal(error: _Error | str) -> bool:
    """Whether an error says that the request is at fault: a status of 4xx."""
    code = error.code if isinstance(error, _Error) else None
    return isinstance(code, int) and _REFUSED <= code < _BROKE


_REFUSED: Final = 400
_BROKE: Final = 500
_HOP_BY_HOP: Final = frozenset(
    (
        "connection",
        "content-length",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)


class EngineExchange:
    """An answer that has begun. Iterate `pieces` once; `aclose` it, however it ends."""

    def __init__(
        self,
        reservation: Reservation,
        response: httpx.Response,
        reader: UsageReader,
        traffic: GatewayTraffic,
        *,
        has_tokens: bool,
    ) -> None:
        self.reservation = reservation
        self.response = response
        self._chunks = response.aiter_raw()
        self._first: bytes | None = None
        self._reader = reader
        self._traffic = traffic
        self._has_tokens = has_tokens  # else nothing was predicted that could be compared
        self._reported = 0  # output tokens
        self._is_over = False

    @classmethod
    async def begun(
        cls,
        http: httpx.AsyncClient,
        request: httpx.Request,
        reservation: Reservation,
        traffic: GatewayTraffic,
        options: GatewayOptions,
        *,
        drops_usage: bool,
        has_tokens: bool,
    ) -> Self:
        """Send a request and wait for the first bytes of its answer.

        Raises:
            EngineFailed: there is none; the reservation is still to be freed.
        """
        try:
            response = await http.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _failed(request, error) from error
        kind = response.headers.get("content-type", "")
        reader = UsageReader(
            is_stream=kind.startswith("text/event-stream"),
            drops_usage=drops_usage,
            bytes_max=options.answer_bytes_max,
        )
        made = cls(reservation, response, reader, traffic, has_tokens=has_tokens)
        try:
            made._first = await anext(made._chunks, None)
        except httpx.HTTPError as error:
            await response.aclose()
            raise _failed(request, error) from error
        except BaseException:
            await response.aclose()
            raise
        return made

    @property
    def status(self) -> int:
        """What the engine answers."""
        return self.response.status_code

    def headers(self) -> list[tuple[str, str]]:
        """Return the engine's headers, as far as they concern the client."""
        named = self.response.headers.multi_items()
        return [one for one in named if one[0].lower() not in _HOP_BY_HOP]

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body; the reservation ends with it."""
        reader, piece = self._reader, self._first
        try:
            while piece is not None:
                passed = reader.feed(piece)
                self._report()
                if passed:
                    yield passed
                piece = await anext(self._chunks, None)
            rest = reader.finish()
            self._report()
            if rest:
                yield rest
            has_failed = reader.has_failed if self.status < _REFUSED else self.status >= _BROKE
            await self._end("failed" if has_failed else "completed")
        except httpx.HTTPError as error:
            self._traffic.broken += 1
            await self._end("failed")
            failure = _failed(self.response.request, error)
            if not self.response.headers.get("content-type", "").startswith("text/event-stream"):
                raise failure from error  # the client sees a connection that breaks
            body = msgspec.json.encode(error_body(failure.status, str(failure), failure.code))
            yield b"data: " + body + b"\n\n"
        finally:
            await self.aclose()

    async def abandon(self) -> None:
        """End it unread, as failed: another worker takes the request."""
        await self._end("failed")

    async def aclose(self) -> None:
        """Free the reservation and leave the engine, which stops its work for us. Idempotent."""
        if not self._is_over:
            self._traffic.left += 1
            await self._end("cancelled")

    def _report(self) -> None:
        reader = self._reader
        if self.status >= _REFUSED:
            return
        if not self._reported and reader.output_tokens:
            self.reservation.prefill_complete()
        if reader.output_tokens > self._reported:
            self.reservation.output_tokens(reader.output_tokens - self._reported)
            self._reported = reader.output_tokens

    async def _end(self, outcome: Outcome) -> None:
        if self._is_over:
            return
        self._is_over = True
        cached = self._reader.cached_tokens
        if cached is not None and self._has_tokens and outcome == "completed":
            self.reservation.prefill_complete(cached_tokens=cached)
        self.reservation.free(outcome)
        await self.response.aclose()


def _failed(request: httpx.Request, error: httpx.HTTPError) -> EngineFailed:
    why = str(error) or type(error).__name__
    where = f"{request.url.scheme}://{request.url.netloc.decode()}"
    if isinstance(error, httpx.ReadTimeout):  # it may still be at work: two would be at one request
        text = f"{where} is silent: {why}"
        return EngineFailed(text, status=504, code="engine_timeout", may_retry=False)
    return EngineFailed(f"{where} failed: {why}")
