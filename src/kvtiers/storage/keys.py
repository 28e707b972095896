"""Storage keys: the name of a page, made of everything that its bytes depend on.

Owns `StorageIdentity` and the way from a path of tokens to `PageRef`s. Knows no store.

The key of page i is BLAKE2b-256(key of page i-1 || tokens of page i), and the first one is seeded
with a digest of the full identity: model fingerprint, LoRA, tenant salt, extra key (all of them in
the namespace's digest), page size in tokens and bytes, pool, layout, shard. So a page can be found
only by somebody who agrees on all of it and knows every token up to its end, in any process:
another tenant, dtype, page size or rank computes other keys and sees a miss.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field

from kvtiers.digests import page_digests
from kvtiers.errors import ConfigError, ProtocolError
from kvtiers.storage.port import PageRef
from kvtiers.types import TOKEN_BYTES, Namespace

KEY_BYTES = 32

_VERSION = b"kvtiers-storage-identity-1"


@dataclass(frozen=True, slots=True)
class StorageIdentity:
    """What the bytes of a stored page depend on, besides the tokens.

    `page_bytes` is the size of a page of `pool` as stored, `layout` names dtype and order of the
    elements (for example "float32/page-first"), `shard` is "rank/size" of the tensor-parallel part.
    """

    namespace: Namespace
    page_tokens: int
    page_bytes: int
    layout: str
    pool: str = "kv"
    shard: str = "0/1"
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or self.page_bytes < 1:
            raise ConfigError(
                f"a stored page has at least 1 token and 1 byte; got {self.page_tokens} tokens "
                f"and {self.page_bytes} bytes"
            )
        state = hashlib.blake2b(_VERSION, digest_size=KEY_BYTES)
        for part in (
            self.namespace.digest,
            self.page_tokens.to_bytes(8, "little"),
            self.page_bytes.to_bytes(8, "little"),
            self.layout.encode(),
            self.pool.encode(),
            self.shard.encode(),
        ):
            # The length keeps neighbours apart: ("a", "bc") is not ("ab", "c").
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        object.__setattr__(self, "digest", state.digest())


def page_refs(
    identity: StorageIdentity,
    path_key: bytes,
    first_page: int,
    pages: int,
    parent: bytes | None = None,
) -> list[PageRef]:
    """References to pages `[first_page, first_page + pages)` of a path.

    `path_key` holds the tokens of the path from its root as int32 bytes, at least up to the last
    page asked for. `parent` is the key of page `first_page - 1` where the caller knows it; without
    it the path is hashed from its root. For several questions about one path use `PathDigests`.
    """
    if parent is None or first_page == 0:
        return PathDigests(identity, path_key).refs(first_page, pages)
    _check_range(identity, path_key, first_page, pages)
    page_key_bytes = identity.page_tokens * TOKEN_BYTES
    view = memoryview(path_key)[first_page * page_key_bytes : (first_page + pages) * page_key_bytes]
    return _refs(identity, page_digests(parent, view, page_key_bytes), first_page, parent)


class PathDigests:
    """The keys of one path, computed lazily and each once. Safe to share between threads.

    Pages are hashed up to the furthest one asked for; `extend` takes over what was hashed when the
    path grows (decode, or a further turn of a chat).
    """

    def __init__(self, identity: StorageIdentity, path_key: bytes) -> None:
        self._identity = identity
        self._path_key = path_key
        self._keys = b""
        self._lock = threading.Lock()

    @property
    def hashed_pages(self) -> int:
        """How many pages from the root have been hashed so far."""
        return len(self._keys) // KEY_BYTES

    def extend(self, path_key: bytes) -> None:
        """The path is now `path_key`, which continues what it was before.

        Raises `ProtocolError` when it does not: another path needs an object of its own.
        """
        with self._lock:
            if not path_key.startswith(self._path_key):
                raise ProtocolError(
                    f"a path of {len(path_key)} key bytes does not continue the one of "
                    f"{len(self._path_key)} key bytes that was hashed; use another PathDigests"
                )
            self._path_key = path_key

    def refs(self, first_page: int, pages: int) -> list[PageRef]:
        """References to pages `[first_page, first_page + pages)`, hashing what is missing."""
        identity = self._identity
        _check_range(identity, self._path_key, first_page, pages)
        page_key_bytes = identity.page_tokens * TOKEN_BYTES
        end_page = first_page + pages
        with self._lock:
            known = self.hashed_pages
            if end_page > known:
                view = memoryview(self._path_key)
                view = view[known * page_key_bytes : end_page * page_key_bytes]
                seed = self._keys[-KEY_BYTES:] or identity.digest
                self._keys += page_digests(seed, view, page_key_bytes)
            keys = self._keys
        parent = keys[(first_page - 1) * KEY_BYTES : first_page * KEY_BYTES] if first_page else b""
        return _refs(
            identity, keys[first_page * KEY_BYTES : end_page * KEY_BYTES], first_page, parent
        )


def _check_range(identity: StorageIdentity, path_key: bytes, first_page: int, pages: int) -> None:
    whole_pages = len(path_key) // (identity.page_tokens * TOKEN_BYTES)
    if first_page < 0 or pages < 0 or first_page + pages > whole_pages:
        raise ProtocolError(
            f"pages [{first_page}, {first_page + pages}) were asked for; the path has "
            f"{whole_pages} whole pages of {identity.page_tokens} tokens"
        )


def _refs(identity: StorageIdentity, keys: bytes, first_page: int, parent: bytes) -> list[PageRef]:
    refs = []
    owner = identity.digest
    for begin in range(0, len(keys), KEY_BYTES):
        key = keys[begin : begin + KEY_BYTES]
        refs.append(PageRef(key, first_page + begin // KEY_BYTES, parent, owner))
        parent = key
    return refs
