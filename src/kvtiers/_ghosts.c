/* An LRU table of page digests, one byte of meaning each: what core/ghost_table.py keeps in an
 * OrderedDict where there is no compiler.
 *
 * A tier that is full forgets a page for every page it takes in, so the cost per page is the cost of
 * memory: one entry of 32 bytes, two to a cache line, in a pool that doubles up to the capacity; a
 * hash chain per bucket, as many buckets as entries; and one doubly linked list through all entries
 * in order of age. Digests are cryptographic, so their first bytes are the hash.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define DIGEST_BYTES 16
#define NONE UINT32_MAX
#define ENTRIES_MIN 1024
#define ENTRIES_MAX ((Py_ssize_t)NONE)

typedef struct {
    uint8_t digest[DIGEST_BYTES];
    uint32_t chained; /* the next entry of its bucket, or of the free list */
    uint32_t older, newer;
    uint8_t meaning;
} Entry;

typedef struct {
    PyObject_HEAD
    Entry *entries;
    uint32_t *buckets;
    Py_ssize_t capacity; /* entries at most */
    Py_ssize_t allocated; /* entries and buckets there is room for: 0 or a power of two */
    Py_ssize_t touched;  /* entries that were ever used; those after them are not in the free list */
    Py_ssize_t used;
    uint32_t oldest, newest, free;
} Table;

static inline uint32_t *bucket_of(const Table *table, const uint8_t *digest)
{
    uint64_t hash;
    memcpy(&hash, digest, sizeof hash);
    return &table->buckets[hash & (uint64_t)(table->allocated - 1)];
}

static void forget_all(Table *table)
{
    PyMem_RawFree(table->entries);
    PyMem_RawFree(table->buckets);
    table->entries = NULL;
    table->buckets = NULL;
    table->allocated = table->touched = table->used = 0;
    table->oldest = table->newest = table->free = NONE;
}

/* Room for one more entry, doubling where there is none; -1 and MemoryError where memory ends. */
static int make_room(Table *table)
{
    if (table->free != NONE || table->touched < table->allocated)
        return 0;
    size_t room = table->allocated ? 2 * (size_t)table->allocated : ENTRIES_MIN;
    Entry *entries = PyMem_RawRealloc(table->entries, room * sizeof *entries);
    if (entries == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    table->entries = entries;
    uint32_t *buckets = PyMem_RawMalloc(room * sizeof *buckets);
    if (buckets == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    PyMem_RawFree(table->buckets);
    table->buckets = buckets;
    table->allocated = (Py_ssize_t)room;
    memset(buckets, 0xff, room * sizeof *buckets);
    for (Py_ssize_t i = 0; i < table->touched; i++) { /* the free list is empty: all are in use */
        uint32_t *bucket = bucket_of(table, entries[i].digest);
        entries[i].chained = *bucket;
        *bucket = (uint32_t)i;
    }
    return 0;
}

static uint32_t find(const Table *table, const uint8_t *digest)
{
    if (table->used == 0)
        return NONE;
    uint32_t at = *bucket_of(table, digest);
    while (at != NONE && memcmp(table->entries[at].digest, digest, DIGEST_BYTES) != 0)
        at = table->entries[at].chained;
    return at;
}

static void leave_order(Table *table, uint32_t at)
{
    Entry *entry = &table->entries[at];
    if (entry->older == NONE)
        table->oldest = entry->newer;
    else
        table->entries[entry->older].newer = entry->newer;
    if (entry->newer == NONE)
        table->newest = entry->older;
    else
        table->entries[entry->newer].older = entry->older;
}

static void become_newest(Table *table, uint32_t at)
{
    Entry *entry = &table->entries[at];
    entry->older = table->newest;
    entry->newer = NONE;
    if (table->newest == NONE)
        table->oldest = at;
    else
        table->entries[table->newest].newer = at;
    table->newest = at;
}

static void forget(Table *table, uint32_t at)
{
    uint32_t *link = bucket_of(table, table->entries[at].digest);
    while (*link != at)
        link = &table->entries[*link].chained;
    *link = table->entries[at].chained;
    leave_order(table, at);
    table->entries[at].chained = table->free;
    table->free = at;
    table->used--;
}

static int remember_one(Table *table, const uint8_t *digest, uint8_t meaning)
{
    uint32_t at = find(table, digest);
    if (at != NONE) {
        leave_order(table, at);
    } else {
        if (table->used == table->capacity)
            forget(table, table->oldest);
        if (make_room(table) < 0)
            return -1;
        if (table->free != NONE) {
            at = table->free;
            table->free = table->entries[at].chained;
        } else {
            at = (uint32_t)table->touched++;
        }
        Entry *entry = &table->entries[at];
        memcpy(entry->digest, digest, DIGEST_BYTES);
        uint32_t *bucket = bucket_of(table, digest);
        entry->chained = *bucket;
        *bucket = at;
        table->used++;
    }
    table->entries[at].meaning = meaning;
    become_newest(table, at);
    return 0;
}

static PyObject *remember(Table *table, PyObject *args)
{
    Py_buffer digests;
    Py_ssize_t first;
    unsigned char meaning;
    if (!PyArg_ParseTuple(args, "y*nb:remember", &digests, &first, &meaning))
        return NULL;
    int failed = 0;
    if (table->capacity > 0)
        for (Py_ssize_t i = digests.len / DIGEST_BYTES - 1; i >= first && !failed; i--)
            failed = remember_one(table, (const uint8_t *)digests.buf + i * DIGEST_BYTES, meaning);
    PyBuffer_Release(&digests);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *take(Table *table, PyObject *argument)
{
    Py_buffer digests;
    if (PyObject_GetBuffer(argument, &digests, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_ssize_t pages = digests.len / DIGEST_BYTES, taken = 0;
    PyObject *meanings = PyBytes_FromStringAndSize(NULL, pages);
    if (meanings != NULL) {
        for (; taken < pages; taken++) {
            uint32_t at = find(table, (const uint8_t *)digests.buf + taken * DIGEST_BYTES);
            if (at == NONE)
                break;
            PyBytes_AS_STRING(meanings)[taken] = (char)table->entries[at].meaning;
            forget(table, at);
        }
        _PyBytes_Resize(&meanings, taken);
    }
    PyBuffer_Release(&digests);
    return meanings;
}

static PyObject *clear(Table *table, PyObject *unused)
{
    (void)unused;
    forget_all(table);
    Py_RETURN_NONE;
}

static PyObject *size_of(Table *table, PyObject *unused)
{
    (void)unused;
    size_t each = sizeof *table->entries + sizeof *table->buckets;
    return PyLong_FromSize_t(sizeof *table + (size_t)table->allocated * each);
}

static Py_ssize_t length(Table *table)
{
    return table->used;
}

static PyObject *new_table(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"capacity", NULL};
    Py_ssize_t capacity;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "n:GhostTable", names, &capacity))
        return NULL;
    if (capacity < 0 || capacity > ENTRIES_MAX) {
        PyErr_Format(PyExc_ValueError, "a table holds 0 to %zd digests, not %zd", ENTRIES_MAX,
                     capacity);
        return NULL;
    }
    Table *table = (Table *)type->tp_alloc(type, 0);
    if (table != NULL) {
        table->capacity = capacity;
        forget_all(table);
    }
    return (PyObject *)table;
}

static void free_table(Table *table)
{
    PyTypeObject *type = Py_TYPE(table);
    forget_all(table);
    type->tp_free((PyObject *)table);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"remember", (PyCFunction)remember, METH_VARARGS,
     "remember(digests, first, meaning): all from `first` on, the last one first"},
    {"take", (PyCFunction)take, METH_O,
     "take(digests) -> one byte each, up to the first that is not there; they are forgotten"},
    {"clear", (PyCFunction)clear, METH_NOARGS, "forget all"},
    {"__sizeof__", (PyCFunction)size_of, METH_NOARGS, "bytes of memory, the table included"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "An LRU table of 16-byte digests with a byte of meaning each."},
    {Py_tp_new, new_table},
    {Py_tp_dealloc, free_table},
    {Py_tp_methods, methods},
    {Py_sq_length, length},
    {0, NULL},
};

static PyType_Spec spec = {
    "kvtiers._ghosts.GhostTable", sizeof(Table), 0, Py_TPFLAGS_DEFAULT, slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_ghosts", "What left the cache, by digest.", -1, NULL,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__ghosts(void)
{
    PyObject *made = PyModule_Create(&module);
    PyObject *type = made == NULL ? NULL : PyType_FromSpec(&spec);
    if (type == NULL || PyModule_AddObject(made, "GhostTable", type) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
