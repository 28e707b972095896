/* The list copy: fragments of pages between a layer-first and a page-first layout, without the GIL.
 *
 * Owns nothing and checks only what it is given by shape: `transfer/listcopy.py` builds the plane
 * table from arrays it holds references to and has checked every slot against both sides.
 *
 *   for every page i, for every plane p:
 *       memcpy(target[p] + target_slots[i] * target_stride[p],
 *              source[p] + source_slots[i] * source_stride[p], bytes[p])
 *
 * Fragments that continue each other on both sides are copied as one.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* One row of the plane table, as the columns of a C-contiguous uint64 array. */
typedef struct {
    uint64_t source, source_stride, target, target_stride, bytes;
} plane;

static Py_ssize_t copy_fragments(const plane *planes, Py_ssize_t plane_count,
                                 const int32_t *source_slots, const int32_t *target_slots,
                                 Py_ssize_t pages, int coalesce) {
    Py_ssize_t calls = 0;
    uintptr_t source = 0, target = 0;
    size_t pending = 0; /* bytes of the run [source, source + pending) not copied yet */
    for (Py_ssize_t i = 0; i < pages; i++) {
        for (Py_ssize_t p = 0; p < plane_count; p++) {
            const plane *row = &planes[p];
            uintptr_t from = (uintptr_t)(row->source + (uint64_t)source_slots[i] * row->source_stride);
            uintptr_t to = (uintptr_t)(row->target + (uint64_t)target_slots[i] * row->target_stride);
            if (coalesce && from == source + pending && to == target + pending) {
                pending += row->bytes;
                continue;
            }
            if (pending) {
                memcpy((void *)target, (const void *)source, pending);
                calls++;
            }
            source = from;
            target = to;
            pending = row->bytes;
        }
    }
    if (pending) {
        memcpy((void *)target, (const void *)source, pending);
        calls++;
    }
    return calls;
}

static PyObject *copy_rows(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer table, source_slots, target_slots;
    int coalesce;
    if (!PyArg_ParseTuple(args, "y*y*y*p:copy_rows", &table, &source_slots, &target_slots,
                          &coalesce))
        return NULL;
    PyObject *result = NULL;
    if (table.len % (Py_ssize_t)sizeof(plane) != 0) {
        PyErr_Format(PyExc_ValueError,
                     "the plane table has %zd bytes; it must be rows of five uint64", table.len);
    } else if (source_slots.len != target_slots.len || source_slots.len % 4 != 0) {
        PyErr_Format(PyExc_ValueError,
                     "slots have %zd and %zd bytes; both must be int32, one per page",
                     source_slots.len, target_slots.len);
    } else {
        Py_ssize_t calls;
        Py_BEGIN_ALLOW_THREADS
        calls = copy_fragments(table.buf, table.len / (Py_ssize_t)sizeof(plane), source_slots.buf,
                               target_slots.buf, source_slots.len / 4, coalesce);
        Py_END_ALLOW_THREADS
        result = PyLong_FromSsize_t(calls);
    }
    PyBuffer_Release(&table);
    PyBuffer_Release(&source_slots);
    PyBuffer_Release(&target_slots);
    return result;
}

static PyMethodDef methods[] = {
    {"copy_rows", copy_rows, METH_VARARGS,
     "copy_rows(table, source_slots, target_slots, coalesce) -> number of memcpy calls\n\n"
     "table: uint64 (planes, 5) of source, source_stride, target, target_stride, bytes, all in\n"
     "bytes; slots: int32, one per page. Addresses and slots are trusted."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_copy", "The list copy of kvtiers.transfer.", -1, methods,
    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copy(void) { return PyModule_Create(&module); }
