from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_XDECREF, Py_XINCREF

cdef enum:
    MEMBERS_MAX = 48

cdef class Layout:
    cdef object kind
    cdef PyTypeObject *type
    cdef object first  # one of them, which copies are like
    cdef int count
    cdef Py_ssize_t offsets[MEMBERS_MAX]

    cdef object copy_of(self, object first)


cdef inline PyObject **place(Layout layout, object one, int which) noexcept:
    return <PyObject **>(<char *><PyObject *>one + layout.offsets[which])


cdef inline object get(Layout layout, object one, int which):
    return <object>place(layout, one, which)[0]


cdef inline void put(Layout layout, object one, int which, object value) noexcept:
    cdef PyObject **there = place(layout, one, which)
    cdef PyObject *before = there[0]
    Py_XINCREF(<PyObject *>value)
    there[0] = <PyObject *>value
    Py_XDECREF(before)


cdef inline int add(Layout layout, object one, int which, object more) except -1:
    put(layout, one, which, get(layout, one, which) + more)
    return 0
