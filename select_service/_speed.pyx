# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""Reads the long arrays of a JSON body without creating a Python integer for every number.

Optional: without it `edge/codec/json_codec.py` lets msgspec read the arrays and packs them
afterwards, with the same result. Everything unusual is left to it, and so is every refusal.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.string cimport memchr, memcmp, memcpy

cdef extern from "_body.h" nogil:
    ctypedef const uint8_t *Text
    Text skip_blanks(Text at, Text end)
    Text skip_string(Text at, Text end)
    Text skip_value(Text at, Text end, int *doubtful)
    ctypedef struct Member:
        Text text
        size_t length
    bint is_new(const Member *members, size_t count, Text text, size_t length)
    size_t count_numbers(Text at, Text closing)
    Text read_hashes(Text at, Text end, size_t count, uint8_t *out, int *others)
    Text read_tokens(Text at, Text end, size_t count, uint8_t *out)

ABI = 9  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    NAMES_MAX = 64  # bits of `seen`
    SLOTS = 256  # of the table of names: mostly empty, so that a probe finds at once
    ARRAYS_MAX = 8
    HASH = 8  # bytes
    TOKEN = 4
    SHOWN_MAX = 65536  # bytes: longer ones are not kept for an answer
    UNKNOWN_MAX = 16  # members nobody knows; where there are more, somebody else counts

cdef struct Name:
    const char *text
    Py_ssize_t length
    int number  # -1: nobody's place
    int width  # bytes of a number, of an array that is to be packed; else 0


cdef inline unsigned int place_of(const uint8_t *text, Py_ssize_t length) noexcept nogil:
    cdef unsigned int mixed = <unsigned int>length
    if length > 0:
        mixed = mixed * 31 + text[0] + 7 * text[length - 1] + 13 * text[length >> 1]
    return mixed % SLOTS


cdef class Scanner:
    """Knows the members of one type of request. Holds no state between calls."""

    cdef Name _table[SLOTS]
    cdef object _names  # keeps the texts alive
    cdef list _attributes
    cdef int _shown  # number of the one whose text is wanted, -1: none's
    cdef object _within, _inner  # a member that is an object, and the array of tokens in it
    cdef object _inner_attribute
    cdef int _number_within

    def __init__(self, names, hashes, tokens, shown=None, inner=None):
        """Prepare the table.

        Args:
            names: of the members that are known, at most 64, as bytes.
            hashes: of those, which hold 64-bit hashes.
            tokens: of those, which hold 32-bit tokens.
            shown: of the hashes, those whose text is wanted, too.
            inner: (member, name): of the names one that holds an object, and of that object the
                member that holds 32-bit tokens; it is taken out as `member.name`.
        """
        self._names = tuple(names)
        self._shown = self._names.index(shown) if shown is not None else -1
        if len(self._names) > NAMES_MAX:
            raise ValueError(f"more than {NAMES_MAX} names")
        self._attributes = [name.decode() for name in self._names]
        cdef int i
        cdef unsigned int place
        cdef bytes name
        self._within, self._inner = (None, None) if inner is None else inner
        self._inner_attribute = "" if inner is None else f"{inner[0].decode()}.{inner[1].decode()}"
        for i in range(SLOTS):
            self._table[i].number = -1
        for i, name in enumerate(self._names):
            place = place_of(<const uint8_t *>PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
            while self._table[place].number >= 0:
                place = (place + 1) % SLOTS
            self._table[place].text = PyBytes_AS_STRING(name)
            self._table[place].length = PyBytes_GET_SIZE(name)
            self._table[place].number = i
            self._table[place].width = (
                HASH if name in hashes else TOKEN if name in tokens else 0
            )
            if name == self._within:
                self._number_within = i

    cdef Name *_find(self, const uint8_t *text, Py_ssize_t length) noexcept:
        cdef unsigned int place = place_of(text, length)
        cdef Name *name = &self._table[place]
        while name.number >= 0:
            if name.length == length and memcmp(name.text, text, length) == 0:
                return name
            place = (place + 1) % SLOTS
            name = &self._table[place]
        return NULL

    def scan(self, bytes body not None):
        """Take the long arrays out of a body.

        Args:
            body: as received.

        Returns:
            None when the body is unusual or wrong. Else (skeleton, unknown, arrays, text): the same
            JSON with `[]` in place of the arrays; the unknown names, None if one may occur twice,
            in the body or in an object inside, or if these are deep; (name, packed little-endian
            numbers) of the arrays; the text of the one that is `shown` if an answer would print it
            the same way, else None.
        """
        cdef Text start = <Text>PyBytes_AS_STRING(body)
        cdef Text end = start + PyBytes_GET_SIZE(body)
        cdef Text at = skip_blanks(start, end)
        cdef Text text
        cdef Text cuts[2 * ARRAYS_MAX]  # first byte behind `[`, and the `]`
        cdef uint64_t seen = 0
        cdef int doubtful = 0, cut = 0, others, unknown_count = 0, at_unknown
        cdef Member unknown[UNKNOWN_MAX]
        cdef Name *name
        cdef bytes packed, shown = None
        cdef list arrays = []
        if at >= end or at[0] != c"{":
            return None
        at = skip_blanks(at + 1, end)
        if at < end and at[0] == c"}":
            return None  # rare enough
        while True:
            if at >= end or at[0] != c'"':
                return None
            text = at + 1
            at = skip_string(at, end)
            if at == NULL:
                return None
            name = self._find(text, at - text - 1)
            if name != NULL:
                doubtful |= seen >> name.number & 1
                seen |= <uint64_t>1 << name.number
            elif memchr(text, c"\\", at - text):
                return None  # it may be one that is known, in other letters
            elif unknown_count < UNKNOWN_MAX and is_new(
                unknown, unknown_count, text, at - text - 1
            ):
                unknown[unknown_count] = Member(text, at - text - 1)
                unknown_count += 1
            else:
                doubtful = 1
            at = skip_blanks(at, end)
            if at >= end or at[0] != c":":
                return None
            at = skip_blanks(at + 1, end)
            if name != NULL and name.width and at < end and at[0] == c"[":
                if cut == 2 * ARRAYS_MAX:
                    return None
                cuts[cut] = at + 1
                others = 0
                packed = _read_array(&at, end, name.width, &others)
                if packed is None:
                    return None
                cuts[cut + 1] = at - 1
                if name.number == self._shown:
                    shown = None
                    if not others and at - cuts[cut] < SHOWN_MAX:
                        shown = (<const char *>cuts[cut] - 1)[: at - cuts[cut] + 1]
                cut += 2
                arrays.append((self._attributes[name.number], packed))
            else:
                text = at
                at = skip_value(at, end, &doubtful)
                if at == NULL:
                    return None
                if (
                    name != NULL and self._within is not None and text[0] == c"{"
                    and cut < 2 * ARRAYS_MAX and name.number == self._number_within
                ):
                    packed = self._take_inner(text, at, &cuts[cut])
                    if packed is not None:
                        cut += 2
                        arrays.append((self._inner_attribute, packed))
            at = skip_blanks(at, end)
            if at >= end:
                return None
            if at[0] == c"}":
                break
            if at[0] != c",":
                return None
            at = skip_blanks(at + 1, end)
        if skip_blanks(at + 1, end) != end:
            return None
        cdef list names = None
        if not doubtful:
            names = []
            try:
                for at_unknown in range(unknown_count):
                    text = unknown[at_unknown].text
                    names.append(
                        PyUnicode_DecodeUTF8(
                            <const char *>text, unknown[at_unknown].length, NULL
                        )
                    )
            except UnicodeDecodeError:
                return None
        return _without(body, cuts, cut), names, arrays, shown

    cdef bytes _take_inner(self, Text at, Text end, Text *cuts):
        """Pack the tokens in an object that is known to be one; None when that cannot be done.

        Args:
            at: where it opens.
            end: behind it.
            cuts: told where they are: the first byte behind `[`, and the `]`.
        """
        cdef bytes inner = self._inner, packed
        cdef Text text
        cdef int ignored = 0
        cdef bint is_it
        at = skip_blanks(at + 1, end)
        while at < end and at[0] == c'"':
            text = at + 1
            at = skip_string(at, end)
            if at == NULL:
                return None
            is_it = at - text - 1 == PyBytes_GET_SIZE(inner) and not memcmp(
                text, PyBytes_AS_STRING(inner), PyBytes_GET_SIZE(inner)
            )
            at = skip_blanks(at, end)
            if at >= end or at[0] != c":":
                return None
            at = skip_blanks(at + 1, end)
            if is_it:
                if at >= end or at[0] != c"[":
                    return None
                cuts[0] = at + 1
                packed = _read_array(&at, end, TOKEN, &ignored)
                cuts[1] = at - 1
                return packed
            at = skip_value(at, end, &ignored)
            if at == NULL:
                return None
            at = skip_blanks(at, end)
            if at >= end or at[0] != c",":
                return None
            at = skip_blanks(at + 1, end)
        return None


cdef bytes _read_array(Text *at, Text end, int width, int *others):
    """Pack the array that opens here and step behind it; None when that cannot be done."""
    cdef Text first = skip_blanks(at[0] + 1, end)
    cdef Text closing = <Text>memchr(first, c"]", end - first)
    if closing == NULL:
        return None
    if closing == first:
        others[0] = 1
        at[0] = closing + 1
        return b""
    cdef size_t count = count_numbers(first, closing)
    if <size_t>(closing - first) < 2 * count - 1:
        return None  # no room for so many: no memory is asked for on behalf of mere commas
    cdef bytes packed = PyBytes_FromStringAndSize(NULL, count * width)
    cdef uint8_t *out = <uint8_t *>PyBytes_AS_STRING(packed)
    cdef Text behind
    if width == HASH:
        others[0] = first != at[0] + 1  # a blank
        behind = read_hashes(first, end, count, out, others)
    else:
        behind = read_tokens(first, end, count, out)
    if behind == NULL:
        return None
    at[0] = behind
    return packed


cdef bytes _without(bytes body, Text *cuts, int count):
    """Copy a body without what lies between each pair of places."""
    if count == 0:
        return body
    cdef Text start = <Text>PyBytes_AS_STRING(body)
    cdef Py_ssize_t length = PyBytes_GET_SIZE(body)
    cdef Text end = start + length
    cdef int i
    for i in range(0, count, 2):
        length -= cuts[i + 1] - cuts[i]
    cdef bytes rest = PyBytes_FromStringAndSize(NULL, length)
    cdef uint8_t *out = <uint8_t *>PyBytes_AS_STRING(rest)
    for i in range(0, count, 2):
        memcpy(out, start, cuts[i] - start)
        out += cuts[i] - start
        start = cuts[i + 1]
    memcpy(out, start, end - start)
    return rest


def msgpack_tokens(bytes packed not None):
    """Return packed tokens as the array of MessagePack that msgspec would make of their list."""
    cdef Py_ssize_t count = PyBytes_GET_SIZE(packed) // TOKEN, at
    cdef bytes text = PyBytes_FromStringAndSize(NULL, count * (TOKEN + 1) + TOKEN + 1)
    cdef const uint8_t *token = <const uint8_t *>PyBytes_AS_STRING(packed)
    cdef uint8_t *begin = <uint8_t *>PyBytes_AS_STRING(text)
    cdef uint8_t *out = begin
    cdef uint32_t value
    if count < 16:
        out[0] = 0x90 | <uint8_t>count
        out += 1
    elif count < 1 << 16:
        out = _head(out, 0xDC, <uint32_t>count, 2)
    else:
        out = _head(out, 0xDD, <uint32_t>count, 4)
    for at in range(count):
        value = (
            token[0] | <uint32_t>token[1] << 8 | <uint32_t>token[2] << 16 | <uint32_t>token[3] << 24
        )
        token += TOKEN
        if value < 128:
            out[0] = <uint8_t>value
            out += 1
        elif value < 1 << 8:
            out = _head(out, 0xCC, value, 1)
        elif value < 1 << 16:
            out = _head(out, 0xCD, value, 2)
        else:
            out = _head(out, 0xCE, value, 4)
    return text[: out - begin]


cdef inline uint8_t *_head(uint8_t *out, uint8_t kind, uint32_t value, int width) noexcept nogil:
    """Write what comes, and a number, its highest byte first."""
    cdef int at
    out[0] = kind
    for at in range(width):
        out[width - at] = value >> 8 * at & 0xFF
    return out + 1 + width
