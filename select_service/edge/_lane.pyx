# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""A plain request from its bytes to its answer, without a frame of Python but the handler's own.

Optional: `FastLane.data_received` in `fast_lane.py`, with `Door.answer_now` and all behind it, is
its plain twin, and everything the turnstile does not take goes that way. It takes requests that
arrive whole under header lines that are known, byte for byte, with a path as plain as they come; it
keeps nothing of its own that could grow old: what header lines mean is looked up with the lane, and
what a call may do is asked each time. A `Passage` keeps what never changes of one connection.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeASCII
from libc.string cimport memchr, memcmp, memcpy

from select_service._layout cimport Layout, add, get, put

from select_service._layout import layout_of
from select_service.edge.codec.answers import ONLY_JSON, Response
from select_service.edge.http.calls import Call, Head
from select_service.edge.http.api import Request
from select_service.edge.http.protocol import GuardedProtocol, Phase
from select_service.edge.http.traffic import LATENCY_BUCKETS_S, RouteTraffic

cdef extern from "time.h" nogil:
    cdef struct timespec:
        long tv_sec
        long tv_nsec
    int clock_gettime(int clock, timespec *now)
    int CLOCK_MONOTONIC

ABI = 3  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    BUCKETS_MAX = 64
    DIGITS_MAX = 24
    OK = 200

cdef enum:
    HEAD_API
    HEAD_LENGTH
    HEAD_GRANT
    HEAD_IS_READABLE
    HEAD_HAS_TYPE

cdef Layout heads = layout_of(
    Head(None, 0, False, False), ("api", "length", "grant", "is_readable", "has_type")
)

cdef enum:
    ANSWER_STATUS
    ANSWER_BODY
    ANSWER_HEADERS
    ANSWER_STREAM

cdef Layout answers = layout_of(Response(OK, b""), ("status", "body", "headers", "stream"))

cdef enum:
    SECONDS

cdef Layout traffics = Layout(RouteTraffic(), ("seconds",))

cdef enum:
    PARAMS
    BODY

cdef Layout requests = layout_of(Request((), b"", b""), ("params", "body"))

cdef object REST = Phase.REST
cdef bytes NOTHING = b""
cdef tuple NO_PARAMS = ()
cdef bytes VERSION = b" HTTP/1.1"
cdef double bounds[BUCKETS_MAX]
cdef int bound_count = len(LATENCY_BUCKETS_S)
assert bound_count <= BUCKETS_MAX
for _number, _bound in enumerate(LATENCY_BUCKETS_S):
    bounds[_number] = _bound

cdef bint may_be_in_id[256]
for _number in range(256):
    may_be_in_id[_number] = _number < 128 and (chr(_number).isalnum() or chr(_number) in "_.~:@-")


cdef inline const char *line_end_in(const char *text, const char *end) noexcept nogil:
    """Where a line ends; NULL if it does not before `end`."""
    text = <const char *>memchr(text, c"\r", end - text)
    while text != NULL and end - text > 1 and text[1] != c"\n":
        text = <const char *>memchr(text + 1, c"\r", end - text - 1)
    if text == NULL or end - text < 2:
        return NULL
    return text


cdef inline double seconds_now() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec * 1e-9


cdef class Outbox:
    """The twin of `fast_lane.PlainOutbox`."""

    cdef list _answers
    cdef Py_ssize_t _most

    def __init__(self, most):
        """Be empty.

        Args:
            most: so many are sent at the latest.
        """
        self._answers = []
        self._most = most

    def put(self, transport, data, loop):
        """Take an answer; before anything else is written to that transport comes a `flush`."""
        if not self._answers:
            loop.call_soon(self.flush)
        self._answers.append((transport, data))
        if len(self._answers) >= self._most:
            self.flush()

    def flush(self):
        """Send all there are."""
        cdef list answers = self._answers
        self._answers = []
        for transport, data in answers:
            if not transport.is_closing():
                transport.write(data)


cdef class Way:
    """A route by the request line that leads to it, which may have an id in it."""

    cdef object route
    cdef object _api, _handler  # who handles it for that one without more ado, else None
    cdef bytes before, behind  # an id, on the request line; behind is b"" where there is none
    cdef bint takes_body, takes_any_body, body_optional
    cdef object stats
    cdef object statuses
    cdef list buckets

    def __init__(self, route, bytes before, bytes behind, stats):
        self.route = route
        self.before, self.behind = before, behind
        self.takes_body = route.takes is not None
        self.takes_any_body = route.takes is None or route.body_lenient
        self.body_optional = route.body_optional
        self.stats = stats
        self.statuses, self.buckets = stats.statuses, stats.buckets

    cdef inline answer(self, api, request):
        """Handle a request, as `Api.do` does."""
        if self._api is not api:
            self._api, self._handler = api, api.direct(self.route)
        if self._handler is not None:
            return self._handler(api, request)
        return api.do(self.route, request)

    cdef inline bint leads(self, const char *line, Py_ssize_t size) noexcept:
        """Whether a request line is this one with a plain id in it."""
        cdef Py_ssize_t before = PyBytes_GET_SIZE(self.before)
        cdef Py_ssize_t behind = PyBytes_GET_SIZE(self.behind)
        cdef Py_ssize_t at
        if size <= before + behind:
            return False
        if memcmp(line, PyBytes_AS_STRING(self.before), before):
            return False
        if memcmp(line + size - behind, PyBytes_AS_STRING(self.behind), behind):
            return False
        for at in range(before, size - behind):
            if not may_be_in_id[<unsigned char>line[at]]:
                return False
        return True

    cdef int observe(self, status, double seconds) except -1:
        """Count an answer, as `RouteTraffic.observe` does."""
        cdef int at = 0
        while at < bound_count and bounds[at] < seconds:
            at += 1
        self.statuses[status] += 1
        self.buckets[at] += 1
        return add(traffics, self.stats, SECONDS, seconds)


cdef class Turnstile:
    """Lets plain requests through, of all connections of one server."""

    cdef object _door
    cdef object _preamble
    cdef Outbox _outbox
    cdef dict _plain  # Way by request line
    cdef list _open  # Way
    cdef object _headers  # uvicorn's, which `_ok` was made with
    cdef bytes _ok

    def __init__(self, door, preamble, Outbox outbox):
        """Stand before a door.

        Args:
            door: answers.
            preamble: the beginning of every answer.
            outbox: sends them.
        """
        self._door, self._preamble, self._outbox = door, preamble, outbox
        self._headers, self._ok = None, NOTHING
        plain, opens = door.ways()
        self._plain = {line: Way(route, line, NOTHING, stats) for line, route, stats in plain}
        self._open = [Way(route, *ends, stats) for ends, route, stats in opens]

    cdef Way _way(self, const char *line, Py_ssize_t size):
        cdef Way way = self._plain.get(PyBytes_FromStringAndSize(line, size))
        if way is None:
            for way in self._open:
                if way.leads(line, size):
                    return way
            return None
        return way

    cdef bint _suits(self, Way way, head, Py_ssize_t length) except -1:
        """Whether a body under this head may be handled at once, as `Door.suits` says."""
        if length > <Py_ssize_t>self._door.max_body_bytes:
            return False
        grant = get(heads, head, HEAD_GRANT)
        if grant is not None and not grant.allows(way.route):
            return False
        if way.takes_any_body or get(heads, head, HEAD_IS_READABLE):
            return True
        return way.body_optional and not get(heads, head, HEAD_HAS_TYPE) and not length

    def passage(self, lane):
        """Return what receives the data of a connection in its place.

        Args:
            lane: a `FastLane` to which nothing has come yet.
        """
        return Passage(self, lane)

    cpdef answer(self, Passage passage, bytes data):
        """Answer a request if it is a plain one.

        Args:
            passage: the connection it came on, between requests.
            data: what has been read.

        Returns:
            bool | None: whether all is done; if not, what was answered is in `lane._handed`. None:
            nothing has happened.
        """
        cdef const char *text = PyBytes_AS_STRING(data)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        cdef Py_ssize_t read_max = 8192  # READ_BYTES_MAX of the twin
        cdef const char *limit = text + (size if size < read_max else read_max)
        cdef const char *found = line_end_in(text, limit)
        if found == NULL:
            return None
        cdef Py_ssize_t line_end = found - text
        while limit - found < 4 or found[2] != c"\r" or found[3] != c"\n":
            found = line_end_in(found + 2, limit)
            if found == NULL:
                return None
        cdef Py_ssize_t end = found - text
        cdef Py_ssize_t length = size - end - 4
        head = passage.known.get(PyBytes_FromStringAndSize(text + line_end, end - line_end))
        if head is None or <Py_ssize_t>get(heads, head, HEAD_LENGTH) != length:
            return None
        cdef Way way = self._way(text, line_end)
        if way is None or not self._suits(way, head, length):
            return None
        transport = passage.transport
        if passage.flow.write_paused or transport.is_closing():
            return None

        lane = passage.lane
        if passage.is_new:
            lane._phase, passage.is_new = REST, False
        cdef tuple params = NO_PARAMS
        cdef Py_ssize_t before
        if way.behind:
            before = PyBytes_GET_SIZE(way.before)
            params = (
                PyUnicode_DecodeASCII(
                    text + before, line_end - before - PyBytes_GET_SIZE(way.behind), NULL
                ),
            )
        cdef bytes body = NOTHING
        if way.takes_body and length:
            body = PyBytes_FromStringAndSize(text + end + 4, length)
        cdef double started = seconds_now()
        api = get(heads, head, HEAD_API)
        try:
            answer = way.answer(api, _request(params, body))
        except Exception as error:
            answer = self._door.fault(error, api, way.route.method, self._path(way, text, line_end))
        if type(answer) is not Response or get(answers, answer, ANSWER_STREAM) is not None:
            lane._idle_since = None
            call = Call(way.route, params, NOTHING, self._path(way, text, line_end))
            return lane.hand_on(call, head, answer)
        status = get(answers, answer, ANSWER_STATUS)
        way.observe(status, seconds_now() - started)
        if (
            status != OK or get(answers, answer, ANSWER_HEADERS) is not ONLY_JSON or lane._is_last
        ):
            lane.write_answer(answer)
            return True
        headers = passage.state.default_headers
        if headers is not self._headers:
            self._preamble.follow(headers)
            self._ok, self._headers = self._preamble.ok, headers
        body = <bytes>get(answers, answer, ANSWER_BODY)
        self._outbox.put(transport, _message(self._ok, body), passage.loop)
        lane._idle_since = 0.0
        return True

    cdef bytes _path(self, Way way, const char *line, Py_ssize_t size):
        cdef Py_ssize_t method = len(way.route.method) + 1
        return PyBytes_FromStringAndSize(line + method, size - method - PyBytes_GET_SIZE(VERSION))


cdef class Passage:
    """One connection, as its transport sees it: data comes here first."""

    cdef Turnstile _turnstile
    cdef readonly object lane
    cdef object transport, flow, state, loop
    cdef dict known  # heads by their lines
    cdef bint is_new  # nothing was answered here yet

    def __init__(self, Turnstile turnstile, lane):
        self._turnstile, self.lane = turnstile, lane
        self.is_new = True

    def data_received(self, data):
        """Answer what has come, or have it read as the twin does."""
        lane = self.lane
        if not lane._is_between or type(data) is not bytes:  # some loop's own kind of buffer
            return GuardedProtocol.data_received(lane, data)
        if self.is_new:  # connected since this was made
            self.transport, self.flow = lane.transport, lane.flow
            self.state, self.loop = lane.server_state, lane.loop
            self.known = lane.heads.known
        done = self._turnstile.answer(self, data)
        if done is None:
            type(lane).data_received(lane, data)
        elif not done:
            GuardedProtocol.data_received(lane, data)


cdef object _request(tuple params, bytes body):
    request = requests.copy_of(requests.first)
    put(requests, request, PARAMS, params)
    put(requests, request, BODY, body)
    return request


cdef bytes _message(bytes ok, bytes body):
    """Return an answer: how it begins, all but the length, and its body."""
    cdef char digits[DIGITS_MAX]
    cdef char *first = digits + DIGITS_MAX
    cdef Py_ssize_t body_size = PyBytes_GET_SIZE(body)
    cdef Py_ssize_t ok_size = PyBytes_GET_SIZE(ok)
    cdef Py_ssize_t left = body_size
    cdef Py_ssize_t count = 0
    while True:
        first -= 1
        first[0] = <char>(48 + left % 10)  # '0'
        left //= 10
        count += 1
        if not left:
            break
    cdef bytes message = PyBytes_FromStringAndSize(NULL, ok_size + count + 4 + body_size)
    cdef char *at = PyBytes_AS_STRING(message)
    memcpy(at, PyBytes_AS_STRING(ok), ok_size)
    memcpy(at + ok_size, first, count)
    memcpy(at + ok_size + count, b"\r\n\r\n", 4)
    memcpy(at + ok_size + count + 4, PyBytes_AS_STRING(body), body_size)
    return message
