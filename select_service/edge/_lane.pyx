# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""A plain request from its bytes to its answer, without a frame of Python but the handler's own.

Optional: `FastLane.data_received` in `fast_lane.py`, with `Door.answer_now` and all behind it, is
its plain twin, and everything the turnstile does not take goes that way. It takes requests that
arrive whole, several in one read if all of them do, under header lines of which those that matter
(`steady.py`) are known, byte for byte, with a path as plain as they come; it keeps nothing of its
own that could grow old: what header lines mean is looked up with the lane, and what a call may do
is asked each time. A `Passage` keeps what never changes of one connection.
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

ABI = 6  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    BUCKETS_MAX = 64
    DIGITS_MAX = 24
    OK = 200
    PIPELINED_MAX = 16  # ANSWERS_MAX: of one read; a client that pipelines must not own the loop
    READ_MAX = 8192  # READ_BYTES_MAX of the twin
    KEPT_MAX = 1024  # HEAD_BYTES_MAX of `head_memory.py`
    NAMES_MAX = 16
    LENGTH_NAME = 14  # bytes of `content-length`
    LENGTH_DIGITS = 12  # LENGTH_DIGITS_MAX of the twin

cdef enum:
    HEAD_API
    HEAD_GRANT
    HEAD_IS_READABLE
    HEAD_HAS_TYPE
    HEAD_IS_LAST

cdef Layout heads = layout_of(
    Head(None, False, False), ("api", "grant", "is_readable", "has_type", "is_last")
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
cdef bytes OLD = b" HTTP/1.0"  # what is before the kept lines of such a head, too
cdef enum:
    VERSION_BYTES = 9
cdef double bounds[BUCKETS_MAX]
cdef int bound_count = len(LATENCY_BUCKETS_S)
assert bound_count <= BUCKETS_MAX
for _number, _bound in enumerate(LATENCY_BUCKETS_S):
    bounds[_number] = _bound

cdef bint may_be_in_id[256]
for _number in range(256):
    may_be_in_id[_number] = _number < 128 and (chr(_number).isalnum() or chr(_number) in "_.~:@-")


cdef bint may_be_in_name[256]
cdef bint may_be_in_value[256]
for _number in range(256):
    may_be_in_name[_number] = _number < 128 and (chr(_number).isalnum() or chr(_number) in "_-")
    may_be_in_value[_number] = _number == 9 or 32 <= _number < 127


cdef struct Text:
    const char *text
    Py_ssize_t length


cdef struct Found:  # of a request, from its beginning on
    Py_ssize_t line_end  # of its first line
    Py_ssize_t body  # where that begins
    Py_ssize_t length  # of that


cdef inline bint is_same(const char *name, const char *lowered, Py_ssize_t length) noexcept nogil:
    """Whether a name is this one. Some control characters pass for `-`: no parser lets them."""
    cdef Py_ssize_t at
    for at in range(length):
        if (name[at] | 0x20) != lowered[at]:
            return False
    return True


cdef inline bint is_of_no_matter(
    const char *name, const char *colon, const char *end
) noexcept nogil:
    """Whether a line that is not kept is nothing but a plain name and a plain value."""
    if name == colon:
        return False
    while name < colon:
        if not may_be_in_name[<unsigned char>name[0]]:
            return False
        name += 1
    while name < end:
        if not may_be_in_value[<unsigned char>name[0]]:
            return False
        name += 1
    return True


cdef inline Py_ssize_t length_in(const char *text, const char *end) noexcept nogil:
    """The number in a line; -1: there is none, or something else."""
    cdef Py_ssize_t length = 0
    while text < end and (text[0] == c" " or text[0] == c"\t"):
        text += 1
    while text < end and ((end - 1)[0] == c" " or (end - 1)[0] == c"\t"):
        end -= 1
    if not 0 < end - text <= LENGTH_DIGITS:
        return -1
    while text < end:
        if not c"0" <= text[0] <= c"9":
            return -1
        length = length * 10 + (text[0] - c"0")
        text += 1
    return length


cdef inline double seconds_now() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec * 1e-9


cdef class Outbox:
    """The twin of `outbox.PlainOutbox`."""

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
    cdef object _headers  # uvicorn's, which these were made with
    cdef bytes _ok
    cdef dict _starts  # of other answers in JSON, by status, and whether they are the last
    cdef object _limits
    cdef object _names  # keeps the texts alive
    cdef Text _kept[NAMES_MAX]
    cdef int _kept_count

    def __init__(self, door, preamble, Outbox outbox, limits, names):
        """Stand before a door.

        Args:
            door: answers.
            preamble: the beginning of every answer.
            outbox: sends them.
            limits: of connections.
            names: of the header lines that matter, in lower case.
        """
        cdef bytes name
        self._limits, self._names = limits, tuple(names)
        if len(self._names) > NAMES_MAX:
            raise ValueError(f"more than {NAMES_MAX} names")
        self._kept_count = len(self._names)
        for at, name in enumerate(self._names):
            self._kept[at] = Text(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
        self._door, self._preamble, self._outbox = door, preamble, outbox
        self._headers, self._ok, self._starts = None, NOTHING, {}
        plain, opens = door.ways()
        self._plain = {line: Way(route, line, NOTHING, stats) for line, route, stats in plain}
        self._open = [Way(route, *ends, stats) for ends, route, stats in opens]

    cdef Way _way(self, const char *line, Py_ssize_t size):
        """Return what a line leads to that says HTTP/1.1, or says it for an older one."""
        cdef Way way = self._plain.get(PyBytes_FromStringAndSize(line, size))
        if way is None:
            for way in self._open:
                if way.leads(line, size):
                    return way
            return None
        return way

    cdef inline bint _is_kept(self, const char *name, Py_ssize_t length) noexcept:
        cdef int at
        for at in range(self._kept_count):
            if self._kept[at].length == length and is_same(name, self._kept[at].text, length):
                return True
        return False

    cdef const char *_read(
        self, const char *line, const char *limit, char *kept, Py_ssize_t *kept_size,
        Py_ssize_t *length,
    ) except? NULL:
        """Read the lines of a head as `Steady.read` does.

        Args:
            line: the break in front of the first one.
            limit: no head is read beyond it.
            kept: room for KEPT_MAX bytes: those that matter.
            kept_size: how many that are.
            length: of the body; 0 when none is announced.

        Returns:
            The break behind the last one; NULL: it has to be parsed.
        """
        cdef const char *end
        cdef const char *colon
        cdef Py_ssize_t said = -1, size
        cdef long lines = 0
        kept_size[0] = 0
        while True:
            if limit - line < 4 or line[1] != c"\n":
                return NULL
            if line[2] == c"\r":
                break
            end = <const char *>memchr(line + 2, c"\r", limit - line - 2)
            if end == NULL:
                return NULL
            lines += 1
            colon = <const char *>memchr(line + 2, c":", end - line - 2)
            if colon == NULL:
                return NULL
            size = colon - line - 2
            if self._is_kept(line + 2, size):
                size = end - line
                if kept_size[0] + size > KEPT_MAX:
                    return NULL
                memcpy(kept + kept_size[0], line, size)
                kept_size[0] += size
            elif size == LENGTH_NAME and is_same(line + 2, b"content-length", LENGTH_NAME):
                if said >= 0:
                    return NULL
                said = length_in(colon + 1, end)
                if said < 0:
                    return NULL
            elif not is_of_no_matter(line + 2, colon, end):
                return NULL
            line = end
        if line[3] != c"\n" or lines > <long>self._limits.header_lines_max:
            return NULL
        length[0] = said if said > 0 else 0
        return line

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

    cdef Way _find(
        self, Passage passage, const char *text, Py_ssize_t size, Found *found
    ):
        """Return what a plain request leads to that begins here and is whole; else None.

        Args:
            passage: the connection it came on; told what the head means, in `head`.
            text: where it begins.
            size: of all that was read from there on.
            found: told where its parts are.
        """
        cdef const char *limit = text + (size if size < READ_MAX else READ_MAX)
        cdef const char *at = <const char *>memchr(text, c"\r", limit - text)
        if at == NULL:
            return None
        cdef Py_ssize_t line_end = at - text
        cdef char kept[KEPT_MAX]
        cdef Py_ssize_t kept_size, length
        at = self._read(at, limit, kept, &kept_size, &length)
        if at == NULL:
            return None
        found.line_end, found.body, found.length = line_end, at - text + 4, length
        if length > size - found.body:
            return None
        cdef bytes lines = PyBytes_FromStringAndSize(kept, kept_size), line
        cdef bint is_old = line_end > VERSION_BYTES and not memcmp(
            text + line_end - VERSION_BYTES, PyBytes_AS_STRING(OLD), VERSION_BYTES
        )
        head = passage.known.get(OLD + lines if is_old else lines)
        if head is None:
            return None
        cdef Way way
        if is_old:
            line = PyBytes_FromStringAndSize(text, line_end - 1) + b"1"
            way = self._way(PyBytes_AS_STRING(line), line_end)
        else:
            way = self._way(text, line_end)
        if way is None or not self._suits(way, head, length):
            return None
        passage.head = head
        return way

    cdef bint _are_plain(self, Passage passage, const char *text, Py_ssize_t size) except -1:
        """Whether all that was read are plain requests, none too many, of which none is the last.

        Where one of them is not, what comes of those before it is the twin's to say.
        """
        cdef Found found
        cdef Py_ssize_t whole
        cdef int count = 0
        while size:
            count += 1
            if count > PIPELINED_MAX or self._find(passage, text, size, &found) is None:
                return False
            if get(heads, passage.head, HEAD_IS_LAST) is True:
                return False
            whole = found.body + found.length
            text, size = text + whole, size - whole
        return True

    cpdef answer(self, Passage passage, bytes data):
        """Answer the first request that was read if it is a plain one, and so are all behind it.

        Args:
            passage: the connection it came on, between requests; what was read behind it is in
                `rest` then.
            data: what has been read.

        Returns:
            bool | None: whether all is done; if not, what was answered is in `lane._handed`. None:
            nothing has happened.
        """
        cdef const char *text = PyBytes_AS_STRING(data)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        cdef Found found
        cdef Way way = self._find(passage, text, size, &found)
        if way is None:
            return None
        cdef Py_ssize_t line_end = found.line_end, whole = found.body + found.length
        head = passage.head
        if whole != size:
            if not passage.is_amid and not self._are_plain(passage, text, size):
                return None
            passage.is_amid = True
            passage.rest = data[whole:]
        transport = passage.transport
        if passage.flow.write_paused or transport.is_closing():
            passage.rest = None
            return None

        lane = passage.lane
        if passage.is_new:
            lane._phase, passage.is_new = REST, False
        if get(heads, head, HEAD_IS_LAST) is True:
            lane._is_last = True
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
        if way.takes_body and found.length:
            body = PyBytes_FromStringAndSize(text + found.body, found.length)
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
        if get(answers, answer, ANSWER_HEADERS) is not ONLY_JSON:
            lane.write_answer(answer)
            return True
        cdef bint is_last = lane._is_last
        start = self._start(status, passage.state.default_headers, is_last)
        body = <bytes>get(answers, answer, ANSWER_BODY)
        self._outbox.put(transport, _message(start, body), passage.loop)
        lane._idle_since = 0.0
        if is_last:
            lane._refused = True
            self._outbox.flush()
            transport.close()
        return True

    cdef bytes _start(self, status, headers, bint is_last):
        """Return all but the length of the head of an answer in JSON."""
        if headers is not self._headers:
            self._preamble.follow(headers)
            self._ok, self._headers = self._preamble.ok, headers
            self._starts.clear()
        if status == OK and not is_last:
            return self._ok
        key = (status, is_last)
        start = self._starts.get(key)
        if start is None:
            start = self._starts[key] = self._preamble.start(status, is_last)
        return start

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
    cdef object head  # what that of the last request means that was looked at
    cdef bytes rest  # what came with a request that is answered; None: nothing
    cdef bint is_amid  # requests of which it is known that they are all plain

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
        self.is_amid = False
        while True:
            self.rest = None
            done = self._turnstile.answer(self, data)
            if done is None:
                type(lane).data_received(lane, data)
                return
            rest = self.rest
            if not done:  # the parser may take it in pieces, and what is behind it behind them
                GuardedProtocol.data_received(lane, data)
                return
            if rest is None:
                return
            if not lane._is_between:  # they queue up
                GuardedProtocol.data_received(lane, rest)
                return
            data = rest


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
