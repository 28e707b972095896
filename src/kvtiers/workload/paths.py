"""From tokens to block ids: a chained, salted digest, so that a trace can be kept without its text.

    id[i] = first 8 bytes of BLAKE2b(key = salt, tokens[0 : (i + 1) * block_tokens])

In a namespace the key is BLAKE2b(key = salt, namespace): equal tokens of two tenants have ids that
are as different as their pages are.

An id names the whole prefix: equal ids mean equal prefixes (up to a chance of 2**-63 per pair),
and without the salt nobody can test a guessed prompt against the trace.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np

from kvtiers.errors import ConfigError
from kvtiers.types import TOKEN_BYTES
from kvtiers.workload.request import BlockIds

_ID_BITS = (1 << 63) - 1


class PathHasher:
    """Block ids of token paths under one salt; the same salt gives the same ids.

    Without `salt` a random one is drawn and never leaves this object.
    """

    def __init__(self, block_tokens: int, salt: bytes | None = None) -> None:
        if block_tokens < 1:
            raise ConfigError(f"block_tokens is {block_tokens}; a block has at least 1 token")
        if salt is not None and not 1 <= len(salt) <= hashlib.blake2b.MAX_KEY_SIZE:
            raise ConfigError(f"a salt has 1 to 64 bytes; got {len(salt)}")
        self.block_tokens = block_tokens
        self._salt = salt or secrets.token_bytes(32)

    def ids(self, key: bytes, namespace: bytes = b"") -> BlockIds:
        """Ids of the blocks of `key` (int32 bytes of the tokens), the last one partial.

        `namespace` is a digest of what the path hangs from; empty where there is only one.
        """
        step = self.block_tokens * TOKEN_BYTES
        salt = self._salt
        if namespace:
            salt = hashlib.blake2b(namespace, key=salt, digest_size=32).digest()
        state = hashlib.blake2b(key=salt, digest_size=8)
        ids = []
        for start in range(0, len(key), step):
            state.update(key[start : start + step])
            ids.append(int.from_bytes(state.copy().digest(), "little") & _ID_BITS)
        return np.array(ids, np.int64)
