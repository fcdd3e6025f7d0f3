# Declarations of `_node.h`: the slots of a tree's node. Call `find_slots` before reading any.

from cpython.object cimport PyObject, PyObject_RichCompareBool, Py_EQ

cdef extern from "_node.h":
    Py_ssize_t N_ALIASES, N_CHILDREN, N_EDGE, N_FULL, N_LOWER
    Py_ssize_t N_MEMBERS, N_NAMESPACE, N_ORPHANED, N_PARENT, N_PARTIAL, N_PATTERNS
    const char *node_slots(PyObject *node, PyObject *coverage)
    PyObject *SLOT(PyObject *object, Py_ssize_t offset)
    void slot_put(PyObject *object, Py_ssize_t offset, PyObject *value)


cdef inline int find_slots(object node, object coverage) except -1:
    cdef const char *missing = node_slots(<PyObject *>node, <PyObject *>coverage)
    if missing != NULL:
        raise ImportError(f"{node.__name__}.{missing.decode()} is no slot")
    return 0


cdef inline bint is_same(PyObject *a, object b) except -1:
    if a == <PyObject *>b:
        return True
    return a != NULL and PyObject_RichCompareBool(<object>a, b, Py_EQ)
