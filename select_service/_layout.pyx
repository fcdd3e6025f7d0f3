# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Reads, writes and copies objects of one type by where they lie: `__slots__`, structs.

For other kernels only. To ask for a member by its name takes a hundred instructions, to make a
struct of twenty members a thousand; here it is ten for each.
"""

cdef extern from "Python.h":
    ctypedef struct PyMemberDef:
        int type
        Py_ssize_t offset
    ctypedef struct PyMemberDescrObject:
        PyMemberDef *d_member
    object PyType_GenericAlloc(PyTypeObject *kind, Py_ssize_t items)

cdef extern from "structmember.h":
    enum:
        T_OBJECT_EX

ABI = 1  # change it with every change of what is offered here: see `indexer/compiled.py`


class _Slotted:
    __slots__ = ("member",)


cdef object _member_descriptor = type(_Slotted.member)


cdef class Layout:
    """Where the members of one type are; each must have been given a value, always."""

    def __init__(self, first, named, others=()):
        """Learn the layout.

        Args:
            first: an object of that type.
            named: members by whose place in this order they are asked for.
            others: the rest, if it is to be copied.

        Raises:
            TypeError: it keeps a member in another way.
        """
        self.kind, self.first = type(first), first
        self.type = <PyTypeObject *>self.kind
        names = (*named, *others)
        if len(names) > MEMBERS_MAX:
            raise TypeError(f"too many members in {self.kind}")
        for at, name in enumerate(names):
            found = getattr(self.kind, name, None)
            if type(found) is not _member_descriptor:
                raise TypeError(f"{name} is no member of {self.kind}")
            if (<PyMemberDescrObject *>found).d_member.type != T_OBJECT_EX:
                raise TypeError(f"{name} is no object in {self.kind}")
            self.offsets[at] = (<PyMemberDescrObject *>found).d_member.offset
        self.count = len(names)

    cdef object copy_of(self, object first):
        """Return another that is like this one; what its members are is shared."""
        cdef object made = PyType_GenericAlloc(self.type, 0)
        cdef PyObject *value
        cdef int at
        for at in range(self.count):
            value = place(self, first, at)[0]
            Py_XINCREF(value)
            place(self, made, at)[0] = value
        return made


def layout_of(first, named):
    """Return the layout of a struct, with all its members."""
    return Layout(first, named, [one for one in first.__struct_fields__ if one not in named])
