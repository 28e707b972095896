/* Chained page digests: digest[i] = BLAKE2b(digest[i-1] || page[i]), over all whole pages of a key.
 *
 * BLAKE2b is RFC 7693, unkeyed, portable C99. One page of 16 tokens and a 32-byte parent fill less
 * than one 128-byte block, so a page costs one compression; what a call of hashlib costs around
 * that compression is what this file saves. kvtiers/digests.py holds the Python fallback, which a
 * property test compares with this byte for byte.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define BLOCK_BYTES 128
#define DIGEST_BYTES_MAX 64

/* Below this many pages the work is shorter than getting the GIL back from a busy thread. */
#define GIL_FREE_PAGES_MIN 64

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908ULL, 0xbb67ae8584caa73bULL, 0x3c6ef372fe94f82bULL, 0xa54ff53a5f1d36f1ULL,
    0x510e527fade682d1ULL, 0x9b05688c2b3e6c1fULL, 0x1f83d9abfb41bd6bULL, 0x5be0cd19137e2179ULL,
};

static inline uint64_t rotate_right(uint64_t word, unsigned bits)
{
    return (word >> bits) | (word << (64 - bits));
}

static inline uint64_t load_le64(const uint8_t *bytes)
{
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    uint64_t word;
    memcpy(&word, bytes, 8);
    return word;
#else
    uint64_t word = 0;
    for (int i = 7; i >= 0; i--)
        word = (word << 8) | bytes[i];
    return word;
#endif
}

#define G(a, b, c, d, x, y)                                                                        \
    do {                                                                                           \
        a = a + b + (x);                                                                           \
        d = rotate_right(d ^ a, 32);                                                               \
        c = c + d;                                                                                 \
        b = rotate_right(b ^ c, 24);                                                               \
        a = a + b + (y);                                                                           \
        d = rotate_right(d ^ a, 16);                                                               \
        c = c + d;                                                                                 \
        b = rotate_right(b ^ c, 63);                                                               \
    } while (0)

/* One round, with its message permutation spelled out so that every index is a constant: columns,
 * then diagonals. */
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15)                \
    do {                                                                                           \
        G(v0, v4, v8, v12, m[s0], m[s1]);                                                          \
        G(v1, v5, v9, v13, m[s2], m[s3]);                                                          \
        G(v2, v6, v10, v14, m[s4], m[s5]);                                                         \
        G(v3, v7, v11, v15, m[s6], m[s7]);                                                         \
        G(v0, v5, v10, v15, m[s8], m[s9]);                                                         \
        G(v1, v6, v11, v12, m[s10], m[s11]);                                                       \
        G(v2, v7, v8, v13, m[s12], m[s13]);                                                        \
        G(v3, v4, v9, v14, m[s14], m[s15]);                                                        \
    } while (0)

static void compress(uint64_t h[8], const uint8_t block[BLOCK_BYTES], uint64_t bytes_so_far, int last)
{
    uint64_t m[16];
    for (int i = 0; i < 16; i++)
        m[i] = load_le64(block + 8 * i);

    uint64_t v0 = h[0], v1 = h[1], v2 = h[2], v3 = h[3];
    uint64_t v4 = h[4], v5 = h[5], v6 = h[6], v7 = h[7];
    uint64_t v8 = IV[0], v9 = IV[1], v10 = IV[2], v11 = IV[3];
    uint64_t v12 = IV[4] ^ bytes_so_far, v13 = IV[5];
    uint64_t v14 = last ? ~IV[6] : IV[6], v15 = IV[7];

    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
    ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4);
    ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8);
    ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13);
    ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9);
    ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11);
    ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10);
    ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5);
    ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0);
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);

    h[0] ^= v0 ^ v8;
    h[1] ^= v1 ^ v9;
    h[2] ^= v2 ^ v10;
    h[3] ^= v3 ^ v11;
    h[4] ^= v4 ^ v12;
    h[5] ^= v5 ^ v13;
    h[6] ^= v6 ^ v14;
    h[7] ^= v7 ^ v15;
}

/* digest = BLAKE2b(parent || page). parent_bytes is in [1, 64], page_bytes at least 1.
 *
 *   block 0                         block 1 ...                 last block, zero-padded
 *   | parent | page[0, 128 - p) |   | page[128 - p, ...) |      | rest of page, 1 to 128 bytes | 0 |
 */
static void digest_page(uint8_t *digest, size_t digest_bytes, const uint8_t *parent,
                        size_t parent_bytes, const uint8_t *page, size_t page_bytes)
{
    uint64_t h[8];
    memcpy(h, IV, sizeof h);
    h[0] ^= 0x01010000ULL ^ (uint64_t)digest_bytes; /* no key, fanout 1, depth 1 */

    uint8_t block[BLOCK_BYTES];
    uint64_t hashed_bytes = 0;
    size_t taken_bytes = BLOCK_BYTES - parent_bytes; /* of the page, by the block being filled */
    size_t filled_bytes = BLOCK_BYTES;
    memcpy(block, parent, parent_bytes);
    if (page_bytes > taken_bytes) {
        memcpy(block + parent_bytes, page, taken_bytes);
        compress(h, block, BLOCK_BYTES, 0);
        hashed_bytes = BLOCK_BYTES;
        page += taken_bytes;
        page_bytes -= taken_bytes;
        while (page_bytes > BLOCK_BYTES) {
            hashed_bytes += BLOCK_BYTES;
            compress(h, page, hashed_bytes, 0);
            page += BLOCK_BYTES;
            page_bytes -= BLOCK_BYTES;
        }
        memcpy(block, page, page_bytes);
        filled_bytes = page_bytes;
    } else {
        memcpy(block + parent_bytes, page, page_bytes);
        filled_bytes = parent_bytes + page_bytes;
    }
    memset(block + filled_bytes, 0, BLOCK_BYTES - filled_bytes);
    compress(h, block, hashed_bytes + filled_bytes, 1);

    uint8_t whole[DIGEST_BYTES_MAX];
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++)
            whole[8 * i + j] = (uint8_t)(h[i] >> (8 * j));
    memcpy(digest, whole, digest_bytes);
}

static void digest_pages(uint8_t *digests, Py_ssize_t digest_bytes, const uint8_t *seed,
                         Py_ssize_t seed_bytes, const uint8_t *key, Py_ssize_t page_bytes,
                         Py_ssize_t pages)
{
    const uint8_t *parent = seed;
    size_t parent_bytes = (size_t)seed_bytes;
    for (Py_ssize_t i = 0; i < pages; i++) {
        uint8_t *digest = digests + i * digest_bytes;
        digest_page(digest, (size_t)digest_bytes, parent, parent_bytes, key + i * page_bytes,
                    (size_t)page_bytes);
        parent = digest;
        parent_bytes = (size_t)digest_bytes;
    }
}

static PyObject *page_digests(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer seed, key;
    Py_ssize_t page_bytes, digest_bytes;
    if (!PyArg_ParseTuple(args, "y*y*nn:page_digests", &seed, &key, &page_bytes, &digest_bytes))
        return NULL;

    PyObject *result = NULL;
    if (seed.len < 1 || seed.len > DIGEST_BYTES_MAX || page_bytes < 1 || digest_bytes < 1 ||
        digest_bytes > DIGEST_BYTES_MAX) {
        PyErr_SetString(PyExc_ValueError,
                        "seed and digest are 1 to 64 bytes long and a page is at least 1 byte");
        goto done;
    }
    Py_ssize_t pages = key.len / page_bytes;
    if (pages > PY_SSIZE_T_MAX / digest_bytes) {
        PyErr_NoMemory();
        goto done;
    }
    result = PyBytes_FromStringAndSize(NULL, pages * digest_bytes);
    if (result == NULL)
        goto done;
    uint8_t *digests = (uint8_t *)PyBytes_AS_STRING(result);
    if (pages < GIL_FREE_PAGES_MIN) {
        digest_pages(digests, digest_bytes, seed.buf, seed.len, key.buf, page_bytes, pages);
    } else {
        Py_BEGIN_ALLOW_THREADS
        digest_pages(digests, digest_bytes, seed.buf, seed.len, key.buf, page_bytes, pages);
        Py_END_ALLOW_THREADS
    }
done:
    PyBuffer_Release(&seed);
    PyBuffer_Release(&key);
    return result;
}

static PyMethodDef methods[] = {
    {"page_digests", page_digests, METH_VARARGS,
     "page_digests(seed, key, page_bytes, digest_bytes) -> the digests of all whole pages, joined"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_digests", "Chained BLAKE2b digests of pages.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__digests(void)
{
    return PyModule_Create(&module);
}
