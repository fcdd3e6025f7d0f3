/* The slots of a tree's node (`core/node.py`), read and written in place. */

#include <structmember.h>

/* Attributes in __slots__ have fixed offsets in the object. Reading one there is as cheap as in the
   interpreter's own specialised code: a tenth of a look-up by name. */
static Py_ssize_t slot_of(PyObject *type, const char *name) {
    Py_ssize_t offset = -1;
    PyObject *found = PyObject_GetAttrString(type, name);
    if (!found) { PyErr_Clear(); return -1; }
    if (Py_IS_TYPE(found, &PyMemberDescr_Type)) {
        PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
        if (member->type == T_OBJECT_EX) offset = member->offset;
    }
    Py_DECREF(found);
    return offset;
}
#define SLOT(object, offset) (*(PyObject **)((char *)(object) + (offset)))

static inline void slot_put(PyObject *object, Py_ssize_t offset, PyObject *value) {
    PyObject *old = SLOT(object, offset);
    Py_INCREF(value);
    SLOT(object, offset) = value;
    Py_XDECREF(old);
}

/* Find the offsets; each module that reads slots calls this once. */
static Py_ssize_t N_ALIASES, N_CHILDREN, N_EDGE, N_FULL, N_LOWER,
     N_MEMBERS, N_NAMESPACE, N_ORPHANED, N_PARENT, N_PARTIAL, N_PATTERNS;

/* NULL, or the name of an attribute that is not a slot. */
static const char *node_slots(PyObject *node, PyObject *coverage) {
    struct { Py_ssize_t *at; PyObject *owner; const char *name; } slots[] = {
        {&N_ALIASES, node, "aliases"}, {&N_CHILDREN, node, "children"}, {&N_EDGE, node, "edge"},
        {&N_LOWER, node, "lower"}, {&N_MEMBERS, node, "members"}, {&N_NAMESPACE, node, "namespace"},
        {&N_ORPHANED, node, "orphaned"}, {&N_PARENT, node, "parent"}, {&N_FULL, coverage, "full"},
        {&N_PARTIAL, coverage, "partial"}, {&N_PATTERNS, coverage, "patterns"},
    };
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++) {
        *slots[i].at = slot_of(slots[i].owner, slots[i].name);
        if (*slots[i].at < 0) return slots[i].name;
    }
    return NULL;
}
