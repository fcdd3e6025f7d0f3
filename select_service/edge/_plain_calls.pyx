# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""Calls that ask for nothing special, from their handler to the core and back, without a frame.

Optional: the handlers of selections and reservations (`http/handlers/`), with the verbs behind
them, are the plain twins, and are called for whatever the kernels of the core (`_shortcut.pyx`,
`_booking.pyx`) do not take; nothing has happened then. What is done here is what lies between: the
body is decoded, the core asked, its effects carried out, the answer written.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.string cimport memcmp

from select_service._layout cimport Layout, get, put
from select_service.core._booking cimport Clerk

from select_service._layout import layout_of
from select_service.core.effects import NOTHING
from select_service.edge.codec.answers import Response
from select_service.edge.codec.json_codec import Decoded
from select_service.edge.http.api import Request
from select_service.edge.http.handlers import reservations, selection
from select_service.errors import ServiceError

ABI = 1  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    PARAMS
    BODY

cdef Layout requests = layout_of(Request((), b"", b""), ("params", "body"))

cdef enum:
    STATUS
    TEXT

cdef Layout responses = layout_of(Response(200, b""), ("status", "body"))

cdef enum:
    DECODED
    WARNING
    UNKNOWN

cdef Layout decodeds = layout_of(Decoded(None, None, b""), ("request", "warning", "unknown"))

cdef enum:
    DECAY_BYTES = 18
    FRACTION_BYTES_MAX = 64

cdef const char *DECAY = b'{"decay_fraction":'
cdef bytes EMPTY = b"{}"  # the body of who has nothing to say
cdef bytes CACHED_TOKENS = b"cached_tokens"
cdef object OK = 200
cdef object CREATED = 201


cdef class PlainCalls:
    """Stands in for some handlers of one `Api`, before which nobody else stands."""

    cdef object _shortcut, _clock, _carry_out, _encode, _done
    cdef Clerk _clerk

    cdef bint _reads_json

    def __init__(
        self, shortcut, Clerk clerk not None, clock, carry_out, bint reads_json, encode, done
    ):
        """Serve callers that may see all of a service that keeps nothing on disk.

        Args:
            shortcut: of its core; None: it has none.
            clerk: likewise.
            clock: monotonic seconds.
            carry_out: carries effects out.
            reads_json: whether that is what bodies are.
            encode: writes answers.
            done: the answer that says nothing but that it is done; the others are like it.
        """
        self._shortcut, self._clerk = shortcut, clerk
        self._clock, self._carry_out, self._reads_json = clock, carry_out, reads_json
        self._encode, self._done = encode, done

    def twins(self):
        """Return what is called here by the handler in the place of which it is."""
        calls = {
            reservations.prefill_complete: self.prefill_complete,
            reservations.output_block: self.output_block,
            reservations.free: self.free,
        }
        if self._shortcut is not None:
            calls[selection.select] = self.select
            calls[selection.select_and_reserve] = self.select_and_reserve
            calls[reservations.reserve] = self.reserve
        return calls

    # -- selections and bookings ----------------------------------------------------------------

    def select(self, api, request):
        """The twin of `selection.select`."""
        decoded = api.bodies.select.decode(get(requests, request, BODY))
        try:
            found = self._shortcut.select(get(decodeds, decoded, DECODED), self._clock())
        except ServiceError as error:
            return selection.refuse(api, error, get(decodeds, decoded, WARNING))
        if found is None:
            return selection.answer(api, decoded, api.service.select_now)
        return self._reply(api, found, OK, get(decodeds, decoded, WARNING))

    def select_and_reserve(self, api, request):
        """The twin of `selection.select_and_reserve`."""
        decoded = api.bodies.select_and_reserve.decode(get(requests, request, BODY))
        found = None
        if not PyBytes_GET_SIZE(get(decodeds, decoded, UNKNOWN)):
            try:
                found = self._shortcut.select_and_reserve(
                    get(decodeds, decoded, DECODED), self._clock()
                )
            except ServiceError as error:
                return selection.refuse(api, error, get(decodeds, decoded, WARNING))
        if found is None:
            return selection.answer(api, decoded, api.service.select_and_reserve_now)
        return self._reply(api, found, OK, get(decodeds, decoded, WARNING))

    def reserve(self, api, request):
        """The twin of `reservations.reserve`."""
        decoded = api.bodies.reservation.decode(get(requests, request, BODY))
        found = None
        if not PyBytes_GET_SIZE(get(decodeds, decoded, UNKNOWN)):
            found = self._shortcut.reserve(get(decodeds, decoded, DECODED), self._clock())
        if found is None:
            return api.answer(decoded, api.service.reserve, CREATED)
        return self._reply(api, found, CREATED, get(decodeds, decoded, WARNING))

    cdef object _reply(self, api, found, status, warning):
        """Carry effects out, and write the answer they came with."""
        answer, effects = <tuple>found
        if effects is not NOTHING:
            self._carry_out(effects)
        if warning is not None:
            return api.writer.reply(answer, status, warning)
        try:
            text = self._encode(answer)
        except OverflowError:  # in MessagePack, where sums may be too large
            return api.writer.reply(answer, status)
        response = responses.copy_of(self._done)
        put(responses, response, STATUS, status)
        put(responses, response, TEXT, text)
        return response

    # -- what comes of bookings -----------------------------------------------------------------

    def prefill_complete(self, api, request):
        """The twin of `reservations.prefill_complete`."""
        cdef bytes body = get(requests, request, BODY)
        if PyBytes_GET_SIZE(body) and CACHED_TOKENS in body:
            return reservations.prefill_complete(api, request)
        name = (<tuple>get(requests, request, PARAMS))[0]
        effects = self._clerk.prefill_complete(name, self._clock())
        if effects is None:
            return reservations.prefill_complete(api, request)
        if effects is not NOTHING:
            self._carry_out(effects)
        return responses.copy_of(self._done)

    def output_block(self, api, request):
        """The twin of `reservations.output_block`."""
        cdef bytes body = get(requests, request, BODY)
        name = (<tuple>get(requests, request, PARAMS))[0]
        if not self._reads_json:
            return reservations.output_block(api, request)
        if body == EMPTY:
            if self._clerk.output_block(name, self._clock()):
                return responses.copy_of(self._done)
            return reservations.output_block(api, request)
        fraction = _fraction_in(body)
        if fraction is None:
            return reservations.output_block(api, request)
        try:
            api.service.output_block(name, fraction)
        except ServiceError as error:
            return api.refusal(error, None)
        return responses.copy_of(self._done)

    def free(self, api, request):
        """The twin of `reservations.free`."""
        name = (<tuple>get(requests, request, PARAMS))[0]
        effects = self._clerk.free(name, self._clock())
        if effects is None:
            return reservations.free(api, request)
        if effects is not NOTHING:
            self._carry_out(effects)
        return responses.copy_of(self._done)


cdef object _fraction_in(bytes body):
    """Return the one member of a body if it is a plain `decay_fraction`; None: let it be decoded.

    Plain are digits, maybe with a point between them, that every reader of JSON takes for the same.
    """
    cdef const char *text = PyBytes_AS_STRING(body)
    cdef Py_ssize_t at = DECAY_BYTES, end = PyBytes_GET_SIZE(body) - 1, first, points = 0
    if not DECAY_BYTES < end <= FRACTION_BYTES_MAX or memcmp(text, DECAY, DECAY_BYTES):
        return None
    if text[end] != c"}":
        return None
    if text[at] == c" ":
        at += 1
    first = at
    while at < end:
        if text[at] == c".":
            points += 1
            if at == first or at + 1 == end:
                return None
        elif not c"0" <= text[at] <= c"9":
            return None
        at += 1
    if first == end or points > 1:
        return None
    if text[first] == c"0" and first + 1 < end and text[first + 1] != c".":
        return None
    return float(body[first:end])
