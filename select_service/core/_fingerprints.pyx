# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""Fingerprints of plain requests, without msgspec's walk over two dozen members.

Optional: `fingerprint_of` in `booking/fingerprints.py` is the plain twin, and is asked for whatever
is not written down here. What a plain request says in MessagePack is mostly the same with all of
its kind: that is kept as bytes, and the members they differ in are written between.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from select_service._layout cimport Layout, place

import msgspec
from msgspec import UNSET
from xxhash import xxh3_128_digest

from select_service._layout import layout_of
from select_service.core.booking.fingerprints import fingerprint_of
from select_service.types import ReservationRequest, SelectAndReserveRequest

cdef extern from "Python.h":
    bint PyBytes_CheckExact(PyObject *one)
    bint PyLong_CheckExact(PyObject *one)
    bint PyUnicode_CheckExact(PyObject *one)
    bint PyUnicode_IS_ASCII(object text)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL

ABI = 2  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    FEW = 16  # members, of a map whose head is one byte

cdef object _in_order = msgspec.msgpack.Encoder(order="deterministic").encode


cdef class Form:
    """How requests of one kind are written for their fingerprint; see above."""

    def __init__(self, first, varying):
        """Learn what is always the same.

        Args:
            first: a plain request, with texts, numbers and bytes of some length in it.
            varying: members that plain requests differ in: texts, numbers or bytes.
        """
        self._name = type(first).__name__.encode()
        self._layout = layout_of(first, varying)
        self._parts, self._present = [], 0
        current = b""
        for name in first.__struct_encode_fields__:
            key, value = _in_order(name), getattr(first, name)
            if name in varying:
                self._parts.append((varying.index(name), current, key))
                current = b""
            elif value is not UNSET:
                current += key + _in_order(value)
                self._present += 1
        self._rest = current
        if self._form_of(first) != self._name + _in_order(first):
            self._parts = None  # written otherwise by this version of msgspec

    cdef bytes fingerprint(self, request):
        """Return the fingerprint of a plain request; the same as `fingerprint_of`."""
        cdef bytes form = self.form_of(request)
        return fingerprint_of(request, b"") if form is None else xxh3_128_digest(form)

    cpdef form_of(self, request):
        """Return what of a plain request its fingerprint is made of; None: ask msgspec."""
        if self._parts is None:
            return None
        try:
            return self._form_of(request)
        except OverflowError:  # a number below zero, or beyond 64 bits
            return None

    cdef bytes _form_of(self, request):
        cdef Layout requests = self._layout
        cdef Py_ssize_t size = PyBytes_GET_SIZE(self._name) + 3 + PyBytes_GET_SIZE(self._rest), length
        cdef Py_ssize_t present = self._present
        cdef bytes before, key, whole
        cdef PyObject *value
        cdef int number
        for number, before, key in <list>self._parts:
            value = place(requests, request, number)[0]
            size += PyBytes_GET_SIZE(before)
            if value == <PyObject *>UNSET:
                continue
            present += 1
            size += PyBytes_GET_SIZE(key)
            if PyUnicode_CheckExact(value):
                if not PyUnicode_IS_ASCII(<object>value):
                    return None
                length = PyUnicode_GET_LENGTH(<object>value)
                size += length + (1 if length < 32 else _head_bytes(length))
            elif PyBytes_CheckExact(value):
                length = PyBytes_GET_SIZE(<object>value)
                size += length + _head_bytes(length)
            elif value == <PyObject *>None:
                size += 1
            elif PyLong_CheckExact(value):
                size += _number_bytes(<object>value)
            else:
                return None
        if present < FEW:
            return None  # it has a shorter head
        whole = PyBytes_FromStringAndSize(NULL, size)
        cdef char *at = PyBytes_AS_STRING(whole)
        at = _head(_copy(at, self._name), 0xDE, present, 2)
        for number, before, key in <list>self._parts:
            at = _copy(at, before)
            value = place(requests, request, number)[0]
            if value == <PyObject *>UNSET:
                continue
            at = _copy(at, key)
            if PyUnicode_CheckExact(value):
                length = PyUnicode_GET_LENGTH(<object>value)
                if length < 32:
                    at[0] = <char>(0xA0 | length)
                    at += 1
                else:
                    at = _sized(at, 0xD9, length)
                memcpy(at, PyUnicode_AsUTF8AndSize(<object>value, &length), length)
                at += length
            elif PyBytes_CheckExact(value):
                at = _copy(_sized(at, 0xC4, PyBytes_GET_SIZE(<object>value)), <bytes><object>value)
            elif value == <PyObject *>None:
                at[0] = <char>0xC0
                at += 1
            else:
                at = _number(at, <uint64_t><object>value)
        _copy(at, self._rest)
        return whole


cdef inline Py_ssize_t _head_bytes(uint64_t size) noexcept nogil:
    return 2 if size < 1 << 8 else 3 if size < 1 << 16 else 5


cdef inline Py_ssize_t _number_bytes(uint64_t value) noexcept nogil:
    return 1 if value < 128 else 1 + (
        1 if value < 1 << 8 else 2 if value < 1 << 16 else 4 if value < <uint64_t>1 << 32 else 8
    )


cdef inline char *_copy(char *at, bytes part) noexcept:
    cdef Py_ssize_t size = PyBytes_GET_SIZE(part)
    memcpy(at, PyBytes_AS_STRING(part), size)
    return at + size


cdef inline char *_head(char *at, int kind, uint64_t value, int width) noexcept:
    """Write a byte that says what comes, and a number, its highest byte first."""
    at[0] = <char>kind
    for kind in range(width):
        at[width - kind] = <char>(value >> 8 * kind & 0xFF)
    return at + 1 + width


cdef inline char *_sized(char *at, int kind, uint64_t size) noexcept:
    """Begin what comes with a length: the byte for a short one, then those for longer ones."""
    if size < 1 << 8:
        return _head(at, kind, size, 1)
    if size < 1 << 16:
        return _head(at, kind + 1, size, 2)
    return _head(at, kind + 2, size, 4)


cdef inline char *_number(char *at, uint64_t value) noexcept:
    if value < 128:
        at[0] = <char>value
        return at + 1
    if value < 1 << 8:
        return _head(at, 0xCC, value, 1)
    if value < 1 << 16:
        return _head(at, 0xCD, value, 2)
    if value < <uint64_t>1 << 32:
        return _head(at, 0xCE, value, 4)
    return _head(at, 0xCF, value, 8)


BOOKING_FORM = Form(
    SelectAndReserveRequest(
        block_hashes=b"12345678", sequence_hashes=b"87654321", isl_tokens=300,
        reservation_id="one", tenant_id="two",
    ),
    (
        "model_name", "tenant_id", "routing_group", "token_ids", "block_hashes",
        "sequence_hashes", "isl_tokens", "selection_id", "reservation_id",
        "expected_output_tokens",
    ),
)
CHOSEN_FORM = Form(
    ReservationRequest(
        block_hashes=b"12345678", sequence_hashes=b"87654321", isl_tokens=300,
        reservation_id="one", worker_id=1 << 63, dp_rank=0, tenant_id="two",
    ),
    (
        "model_name", "tenant_id", "routing_group", "block_hashes", "sequence_hashes",
        "isl_tokens", "selection_id", "reservation_id", "expected_output_tokens", "worker_id",
        "dp_rank", "effective_prefill_tokens",
    ),
)
