from select_service._layout cimport Layout

cdef class Form:
    cdef Layout _layout
    cdef bytes _name  # of the kind
    cdef list _parts  # of what a fingerprint is made of: a member, what is before it, its name
    cdef bytes _rest  # behind them
    cdef int _present  # members that are always there

    cdef bytes fingerprint(self, request)
    cpdef form_of(self, request)
    cdef bytes _form_of(self, request)
