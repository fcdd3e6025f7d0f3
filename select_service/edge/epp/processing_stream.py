"""One HTTP request of a gateway: its messages in their order, the answers to each, one reservation.

How bodies are sent decides when a worker is chosen. Full duplex, as the endpoint picker's protocol
wants it: the whole body is received first, then headers, body and trailers are answered. Buffered:
the headers are answered at once, the body names the endpoint. Streamed, or without a body: the
headers name it, by load alone. The response follows: its first bytes end the prefill, its end frees
the reservation, and so does whatever ends the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from select_service.edge.epp import messages
from select_service.edge.epp.messages import (
    BUFFERED,
    BUFFERED_PARTIAL,
    FULL_DUPLEX_STREAMED,
)
from select_service.edge.epp.picker import Wishes
from select_service.errors import BodyTooLarge, BoundReached
from select_service.tokenization.openai_body import (
    BYTES_PER_TOKEN,
    FAIRNESS_HEADER,
    OBJECTIVE_HEADER,
    PromptBody,
    read_body,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from select_service.edge.epp.picker import Choice, Picker
    from select_service.edge.epp.picker_traffic import PickerTraffic
    from select_service.types import Outcome
    from select_service.types.router_config import PickerLimits

_SUBSET: Final = "envoy.lb.subset_hint"
_SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
_SERVED_KEY: Final = "x-gateway-destination-endpoint-served"
_HEARD: Final = frozenset(
    {":path", ":status", "content-type", "content-length", OBJECTIVE_HEADER, FAIRNESS_HEADER}
)

_ENGINE_FAILED: Final = "5"  # as for Envoy's own outlier detection
"""How the status of a response begins that shows a failed engine."""

_SIGN_OF_LIFE_S: Final = 30.0
"""How often a response that goes on touches its reservation, which would expire otherwise."""

_TOKENS_MAX: Final = (1 << 31) - 1
_DIGITS_MAX: Final = 18


class OutOfOrder(Exception):
    """A message that the protocol does not allow here; the text says which."""


class TooMuchHeld(BoundReached):
    """The bodies of all streams together take more than they may."""

    status = 429
    code = "buffered_bytes_exceeded"


class ProcessingStream:
    """The stream of one HTTP request. `close` it, however it ends."""

    def __init__(
        self,
        picker: Picker,
        limits: PickerLimits,
        traffic: PickerTraffic,
        clock: Callable[[], float],
        tenant_id: str = "default",
    ) -> None:
        """Receive nothing yet.

        Args:
            picker: chooses, and follows what was chosen.
            limits: how long bodies may be.
            traffic: counts.
            clock: monotonic seconds.
            tenant_id: whose requests these are.
        """
        self._picker, self._limits, self._traffic = picker, limits, traffic
        self._clock = clock
        self._tenant_id = tenant_id
        self._request_mode = self._response_mode = FULL_DUPLEX_STREAMED  # until it is said
        self._is_first = True
        self._headers: dict[str, str] | None = None
        self._among: frozenset[str] | None = None
        self._body = bytearray()
        self._choice: Choice | None = None
        self._was_placed = False  # once for a stream; its reservation may be gone by now
        self._has_body = False  # a message of the request's body came
        self._has_ended = False  # the request's body
        self._is_done = False  # the response
        self._has_failed = False  # the engine, as the response says
        self._touched_at = 0.0

    async def receive(self, message: Any) -> list[Any]:
        """Take a `ProcessingRequest`, and return the answers to send, in order.

        Raises:
            ServiceError: the request is refused; the gateway is to get `replies.refusal`.
            OutOfOrder: the message makes no sense; the stream is to be ended.
        """
        kind = message.WhichOneof("request")
        if kind is None:
            raise OutOfOrder("a message without a part of the request or response")
        if self._is_first:
            self._is_first = False
            if message.HasField("protocol_config"):
                self._request_mode = message.protocol_config.request_body_mode
                self._response_mode = message.protocol_config.response_body_mode
        if message.observability_mode:
            return []  # no answer is awaited
        self._note_subset(message)
        handle = getattr(self, f"_{kind}")
        answers: list[Any] = await handle(message)
        return answers

    def close(self) -> None:
        """The stream is over, or broken: nothing stays booked or held. Idempotent."""
        self._drop_body()
        if not self._is_done and self._choice is not None:
            self._traffic.broken += 1
            self._finish("cancelled")  # by its client, or an engine: that is not known

    # -- the request -------------------------------------------------------------------------------

    async def _request_headers(self, message: Any) -> list[Any]:
        if self._headers is not None or self._has_body or self._has_ended:
            raise OutOfOrder("request headers twice, or behind the body")
        self._headers = _headers(message.request_headers)
        if message.request_headers.end_of_stream:
            self._has_ended = True
            return await self._place(PromptBody(reason="no_body"), "request_headers")
        if self._request_mode in (BUFFERED, BUFFERED_PARTIAL):
            return [messages.passed_on("request_headers")]
        if self._request_mode == FULL_DUPLEX_STREAMED:
            return []
        body = PromptBody(length=_announced(self._headers), reason="no_body")
        return await self._place(body, "request_headers")

    async def _request_body(self, message: Any) -> list[Any]:
        if self._has_ended:
            raise OutOfOrder("request body behind its end")
        part = message.request_body
        self._has_body = True
        if self._request_mode == FULL_DUPLEX_STREAMED:
            self._keep(part.body)
            return await self._whole_body(is_last=True) if part.end_of_stream else []
        self._has_ended = part.end_of_stream
        if self._was_placed or self._request_mode not in (BUFFERED, BUFFERED_PARTIAL):
            return [messages.passed_on("request_body")]
        self._keep(part.body)
        return await self._place(self._read(), "request_body")

    async def _request_trailers(self, message: Any) -> list[Any]:
        if self._has_ended and self._request_mode == FULL_DUPLEX_STREAMED:
            raise OutOfOrder("request trailers behind the end of the body")
        if self._request_mode == FULL_DUPLEX_STREAMED:
            answers = await self._whole_body(is_last=False)
            if self._headers is None and not self._has_body:
                return answers
            return [*answers, messages.passed_on("request_trailers")]
        self._has_ended = True
        if not self._was_placed:  # buffered, and no body came
            return await self._place(PromptBody(reason="no_body"), "request_trailers")
        return [messages.passed_on("request_trailers")]

    async def _whole_body(self, *, is_last: bool) -> list[Any]:
        """Answer headers and body of a full-duplex stream."""
        self._has_ended = True
        body = bytes(self._body)
        kind = "request_headers"
        if self._headers is None:  # the gateway does not send them
            kind = "request_body" if self._has_body else "request_trailers"
        answers = await self._place(self._read(), kind)
        pieces = []
        if self._has_body:
            pieces = list(messages.body_pieces("request_body", body, is_last=is_last))
        if kind == "request_headers" or not pieces:
            return [*answers, *pieces]
        first, *rest = pieces  # the first piece names the endpoint
        first.MergeFrom(answers[0])
        return [first, *rest]

    async def _place(self, body: PromptBody, kind: str) -> list[Any]:
        if self._is_done:
            raise OutOfOrder("a request that goes on behind the end of its response")
        if self._was_placed:
            raise OutOfOrder("a second request on one stream")
        headers = self._headers or {}
        wishes = Wishes(
            tenant_id=self._tenant_id,
            slo_class=headers.get(OBJECTIVE_HEADER) or None,
            fairness_id=headers.get(FAIRNESS_HEADER) or None,
            among=self._among,
        )
        try:
            choice = self._choice = await self._picker.choose(body, wishes)
        finally:
            self._drop_body()
        self._was_placed = True
        self._touched_at = self._clock()
        self._traffic.chosen += 1
        return [messages.destination(kind, choice)]

    def _read(self) -> PromptBody:
        headers = self._headers or {}
        return read_body(
            bytes(self._body), headers.get(":path", ""), headers.get("content-type", "")
        )

    def _keep(self, piece: bytes) -> None:
        limits, traffic = self._limits, self._traffic
        if len(self._body) + len(piece) > limits.body_bytes_max:
            traffic.limit_hits["epp_body_bytes_max"] += 1
            raise BodyTooLarge(f"request body exceeds {limits.body_bytes_max} bytes")
        if traffic.buffered_bytes + len(piece) > limits.buffered_bytes_max:
            traffic.limit_hits["epp_buffered_bytes_max"] += 1
            most = limits.buffered_bytes_max
            raise TooMuchHeld(f"bodies under way take {most} bytes (--epp-buffered-bytes-max)")
        self._body += piece
        traffic.buffered_bytes += len(piece)

    def _drop_body(self) -> None:
        self._traffic.buffered_bytes -= len(self._body)
        self._body = bytearray()

    def _note_subset(self, message: Any) -> None:
        found = message.metadata_context.filter_metadata
        if _SUBSET not in found:
            return
        fields = found[_SUBSET].fields
        if _SUBSET_KEY in fields:
            self._among = frozenset(_texts(fields[_SUBSET_KEY]))

    # -- the response ------------------------------------------------------------------------------

    async def _response_headers(self, message: Any) -> list[Any]:
        self._note_served(message)
        status = _headers(message.response_headers).get(":status", "")
        self._has_failed = status.startswith(_ENGINE_FAILED)
        if message.response_headers.end_of_stream:
            self._finish()
        return [messages.passed_on("response_headers")]

    async def _response_body(self, message: Any) -> list[Any]:
        part = message.response_body
        if part.body and not self._has_failed:  # else it is no word of a prompt
            self._note_progress()
        if part.end_of_stream:
            self._finish()
        if self._response_mode != FULL_DUPLEX_STREAMED:
            return [messages.passed_on("response_body")]
        pieces = messages.body_pieces("response_body", part.body, is_last=part.end_of_stream)
        return list(pieces)

    async def _response_trailers(self, message: Any) -> list[Any]:
        self._finish()
        return [messages.passed_on("response_trailers")]

    def _note_served(self, message: Any) -> None:
        fields = message.metadata_context.filter_metadata
        if self._choice is None or self._is_done or messages.NAMESPACE not in fields:
            return
        served = fields[messages.NAMESPACE].fields
        if _SERVED_KEY in served:
            self._picker.served(self._choice, served[_SERVED_KEY].string_value)

    def _note_progress(self) -> None:
        """The response has begun, or goes on."""
        choice = self._choice
        if choice is None or self._is_done:
            return
        now = self._clock()
        has_begun = choice.request is None
        if not has_begun or now - self._touched_at >= _SIGN_OF_LIFE_S:
            choice.request, self._touched_at = None, now
            if not self._picker.prefill_complete(choice):
                self._choice = None

    def _finish(self, outcome: Outcome = "completed") -> None:
        if not self._is_done:
            self._is_done = True
            if self._choice is not None:
                self._picker.free(self._choice, "failed" if self._has_failed else outcome)


def _headers(part: Any) -> dict[str, str]:
    """Return the headers that are looked at; their names are in lower case."""
    found: dict[str, str] = {}
    for one in part.headers.headers:
        name = one.key.lower()
        if name in _HEARD:
            found[name] = (one.raw_value or one.value.encode()).decode(errors="replace")
    return found


def _announced(headers: dict[str, str]) -> int:
    """Return how many tokens a body of the announced length may have."""
    text = headers.get("content-length", "")
    size = int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX else 0
    return min(_TOKENS_MAX, max(1, size // BYTES_PER_TOKEN))


def _texts(value: Any) -> Iterable[str]:
    """Return the texts of a list, or of a text with commas."""
    if value.WhichOneof("kind") == "list_value":
        return [one.string_value for one in value.list_value.values]
    return [one.strip() for one in value.string_value.split(",")]
