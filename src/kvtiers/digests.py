"""Chained digests of the pages of a key: the one place where tokens are hashed.

Owns the function that turns a key into digests, native where a compiler was there at install. It
knows nothing of identities or stores: storage keys seed it with a full identity, the core's ghosts
with a namespace.

    digest[0] = BLAKE2b(seed        || page[0])
    digest[i] = BLAKE2b(digest[i-1] || page[i])

so `page_digests(s, a + b, ...)` equals `page_digests(s, a, ...)` followed by
`page_digests(last digest of a, b, ...)`: a path that grew is never hashed twice. Both
implementations give the same bytes on every machine and in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeAlias

DIGEST_BYTES_MAX = 64

_PageDigests: TypeAlias = Callable[[bytes, bytes | memoryview, int, int], bytes]


def _find_native() -> _PageDigests | None:
    try:
        from kvtiers._digests import page_digests as native
    except ImportError:  # built without a compiler: the same digests, more slowly
        return None
    return native


_native_page_digests = _find_native()

NATIVE = _native_page_digests is not None
"""Whether the native implementation was built."""


def page_digests(
    seed: bytes, key: bytes | memoryview, page_bytes: int, digest_size: int = 32
) -> bytes:
    """The digests of all whole pages of `key`, joined: `digest_size` bytes for each.

    `seed` (1 to 64 bytes) is the digest before the first page: a namespace's or an identity's, or
    that of the last page already known. Bytes after the last whole page have no digest. The GIL is
    free during long calls of the native implementation.

    Raises `ValueError` for a seed, page or digest size out of range.
    """
    if _native_page_digests is not None:
        return _native_page_digests(seed, key, page_bytes, digest_size)
    return python_page_digests(seed, key, page_bytes, digest_size)


def python_page_digests(
    seed: bytes, key: bytes | memoryview, page_bytes: int, digest_size: int = 32
) -> bytes:
    """`page_digests` in plain Python: the fallback, and the oracle of the native one's tests."""
    if not (
        1 <= len(seed) <= DIGEST_BYTES_MAX
        and 1 <= digest_size <= DIGEST_BYTES_MAX
        and page_bytes >= 1
    ):
        raise ValueError("seed and digest are 1 to 64 bytes long and a page is at least 1 byte")
    view = memoryview(key)
    digests = []
    digest = seed
    for begin in range(0, len(view) // page_bytes * page_bytes, page_bytes):
        state = hashlib.blake2b(digest, digest_size=digest_size)
        state.update(view[begin : begin + page_bytes])
        digest = state.digest()
        digests.append(digest)
    return b"".join(digests)
