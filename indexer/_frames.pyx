# cython: language_level=3, boundscheck=False, wraparound=False
"""The compiled receive path of ZMQ sockets: many messages per call, with no pyzmq frame objects.

Optional. `Receiver.receive_some` in `edge/receiver.py` is its twin. It calls whichever libzmq pyzmq
has loaded, so it needs none of its own.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.string cimport memcpy

from indexer.core.events import HEAD_BYTES, Oversized

ABI = 3  # change it with every change of what is offered here: see `indexer/compiled.py`


cdef extern from *:
    """
    #include <dlfcn.h>
    #include <errno.h>

    /* zmq_msg_t: 64 bytes since libzmq 4.0, aligned like a pointer. */
    typedef union { unsigned char bytes[64]; void *aligned; } message_t;

    static int (*msg_init)(message_t *);
    static int (*msg_recv)(message_t *, void *, int);
    static int (*msg_close)(message_t *);
    static int (*msg_move)(message_t *, message_t *);
    static int (*msg_more)(const message_t *);
    static void *(*msg_data)(message_t *);
    static size_t (*msg_size)(const message_t *);
    static int (*last_errno)(void);

    /* Find whichever libzmq pyzmq has loaded. */
    static int find_libzmq(const char *pyzmq) {
        void *library = dlopen(pyzmq, RTLD_LAZY | RTLD_NOLOAD);
        if (!library) return 0;
        *(void **)&msg_init = dlsym(library, "zmq_msg_init");
        *(void **)&msg_recv = dlsym(library, "zmq_msg_recv");
        *(void **)&msg_close = dlsym(library, "zmq_msg_close");
        *(void **)&msg_move = dlsym(library, "zmq_msg_move");
        *(void **)&msg_more = dlsym(library, "zmq_msg_more");
        *(void **)&msg_data = dlsym(library, "zmq_msg_data");
        *(void **)&msg_size = dlsym(library, "zmq_msg_size");
        *(void **)&last_errno = dlsym(library, "zmq_errno");
        return msg_init && msg_recv && msg_close && msg_move && msg_more && msg_data && msg_size
            && last_errno;
    }

    /* The next frame: 1, with its size and whether another follows, or 0 if there is none. Of one
       longer than `longest` only the head; one longer than `piece` is moved to `whole`, and `frame`
       is NULL. */
    static int next_frame(
        void *socket, size_t longest, size_t head, size_t piece, PyObject **frame, size_t *size,
        int *more, message_t *whole
    ) {
        message_t message;
        msg_init(&message);
        while (msg_recv(&message, socket, 1 /* ZMQ_DONTWAIT */) < 0)
            if (last_errno() != EINTR) { msg_close(&message); return 0; }
        *size = msg_size(&message);
        *more = msg_more(&message);
        if (*size > piece && *size <= longest) {
            *frame = NULL;
            msg_move(whole, &message);
            msg_close(&message);
            return 1;
        }
        *frame = PyBytes_FromStringAndSize(
            (const char *)msg_data(&message), *size > longest ? head : *size
        );
        msg_close(&message);
        return *frame ? 1 : -1;
    }
    """
    ctypedef struct message_t:
        pass
    bint find_libzmq(const char *pyzmq)
    int msg_init(message_t *message)
    int msg_close(message_t *message)
    void *msg_data(message_t *message)
    size_t msg_size(const message_t *message)
    int next_frame(
        void *socket, size_t longest, size_t head, size_t piece, PyObject **frame, size_t *size,
        int *more, message_t *whole
    ) except -1


def find(str pyzmq):
    """Find the libzmq of pyzmq's extension module at this path; False if it is not exported."""
    return find_libzmq(pyzmq.encode())


cdef class LongFrame:
    """A long frame as libzmq holds it, copied piece by piece.

    Attributes:
        size: Bytes of the whole.
        copied: Bytes copied so far.
    """

    cdef message_t message
    cdef bytes content
    cdef readonly size_t size, copied

    def __cinit__(self):
        msg_init(&self.message)

    def __dealloc__(self):
        msg_close(&self.message)

    def copy(self, size_t most):
        """Copy up to so many bytes more; return the whole once all are copied, else None."""
        cdef size_t count
        if self.content is None:
            self.size = msg_size(&self.message)
            self.content = PyBytes_FromStringAndSize(NULL, self.size)
        count = min(most, self.size - self.copied)
        memcpy(
            PyBytes_AS_STRING(self.content) + self.copied,
            <char *>msg_data(&self.message) + self.copied,
            count,
        )
        self.copied += count
        if self.copied < self.size:
            return None
        content, self.content = self.content, b""
        msg_close(&self.message)
        msg_init(&self.message)
        return content


def receive(
    size_t socket, Py_ssize_t messages_max, Py_ssize_t bytes_max, size_t longest, bytes apart
):
    """Return messages of an open socket of the calling thread, as lists of frames; non-blocking.

    Of a frame of more than `longest` bytes only the head is copied, into an `Oversized`. One of
    more than `bytes_max` is not copied yet: a `LongFrame`, in the last message.
    Stops when the socket is empty, at either limit, or after a message whose first frame is
    `apart`.
    """
    cdef list messages = [], frames
    cdef PyObject *frame = NULL
    cdef int more = 0
    cdef Py_ssize_t size = 0
    cdef LongFrame whole = LongFrame()
    cdef size_t length = 0, head = HEAD_BYTES if longest > HEAD_BYTES else longest
    while PyList_GET_SIZE(messages) < messages_max and size < bytes_max:
        frames = []
        more = 1
        while more and next_frame(
            <void *>socket, longest, head, bytes_max, &frame, &length, &more, &whole.message
        ):
            if frame is NULL:
                whole.size = length
                frames.append(whole)
                whole = LongFrame()
                size += length
                continue
            data = <object>frame
            Py_DECREF(data)  # the list keeps the only reference
            if length > longest:
                data = Oversized.of(data, length)
            frames.append(data)
            size += PyBytes_GET_SIZE(data)
        if not frames:
            break
        messages.append(frames)
        if frames[0] == apart:
            break
    return messages
