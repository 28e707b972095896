"""An LRU table of page digests with a byte of meaning each: the memory behind the ghosts.

A full tier forgets one page for every page it takes in, so with small pages this is called for
every token of a prompt. Native where a compiler was there at install (`_ghosts.c`, 36 bytes a
digest at most twice over, about 0.1 us), an `OrderedDict` where not (about 0.7 us).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Protocol

DIGEST_BYTES = 16
"""Size of the page digests that the ghosts remember."""


class GhostTable(Protocol):
    """At most `capacity` digests; the one that was remembered longest ago goes first."""

    def __len__(self) -> int: ...

    def remember(self, digests: bytes, first: int, meaning: int, /) -> None:
        """The digests `[first, ...)` of those joined in `digests`, the last of them first.

        `meaning` is 0 to 255 and replaces the one a digest had.
        """

    def take(self, digests: bytes, /) -> bytes:
        """The meanings of the digests joined in `digests`, up to the first that is not there.

        Those that were found are forgotten.
        """

    def clear(self) -> None: ...


class PythonGhostTable:
    """The fallback, and the oracle of the native table's tests."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._meanings: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._meanings)

    def __sizeof__(self) -> int:
        return sys.getsizeof(self._meanings) + sum(map(sys.getsizeof, self._meanings))

    def remember(self, digests: bytes, first: int, meaning: int, /) -> None:
        meanings = self._meanings
        for begin in range(len(digests) - DIGEST_BYTES, (first - 1) * DIGEST_BYTES, -DIGEST_BYTES):
            digest = digests[begin : begin + DIGEST_BYTES]
            meanings[digest] = meaning
            meanings.move_to_end(digest)
        while len(meanings) > self._capacity:
            meanings.popitem(last=False)

    def take(self, digests: bytes, /) -> bytes:
        taken = bytearray()
        for begin in range(0, len(digests), DIGEST_BYTES):
            meaning = self._meanings.pop(digests[begin : begin + DIGEST_BYTES], None)
            if meaning is None:
                break
            taken.append(meaning)
        return bytes(taken)

    def clear(self) -> None:
        self._meanings.clear()


def ghost_table(capacity: int) -> GhostTable:
    """An empty table of at most `capacity` digests (0: it remembers nothing)."""
    try:
        from kvtiers._ghosts import GhostTable as NativeGhostTable
    except ImportError:  # built without a compiler: the same, more slowly
        return PythonGhostTable(capacity)
    return NativeGhostTable(capacity)
