"""Several threads on one file store whose disk fails, stutters and takes its time.

Whatever happens: no page is ever read with another page's bytes, the quota holds, and afterwards
what is on disk, in the index and free is the same story.
"""

import errno
import os
import random
import threading
import time

import pytest

from kvtiers.storage import FileStore
from kvtiers.storage.file.format import unpack_header_table
from kvtiers.storage.port import PageRef
from kvtiers.testing.storage_contract import path_refs, payload
from kvtiers.types import FailReason

PAGE_BYTES = 4096
QUOTA_BYTES = 1 << 20
PATHS = 12
LONGEST = 60
STEPS = 150


class FlakyDisk:
    """`os.pwritev` with errors, short writes and delays, from one seed."""

    def __init__(self, seed: int, pwritev) -> None:
        self._random = random.Random(seed)
        self._pwritev = pwritev
        self._lock = threading.Lock()

    def __call__(self, fd, buffers, offset):
        with self._lock:
            chance = self._random.random()
        if chance < 0.02:
            raise OSError(self._random.choice((errno.EIO, errno.ENOSPC)), "a moment of weakness")
        if chance < 0.06 and len(buffers) > 1:
            return self._pwritev(fd, buffers[:1], offset)
        if chance < 0.3:
            time.sleep(0.0002)
        return self._pwritev(fd, buffers, offset)


class User(threading.Thread):
    """Writes, reads and deletes at random, and remembers what must not have happened."""

    def __init__(self, store: FileStore, paths: list[list[PageRef]], seed: int) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self._store = store
        self._paths = paths
        self._random = random.Random(seed)

    def run(self) -> None:
        try:
            for _ in range(STEPS):
                self._step()
        except Exception as error:
            self.wrong.append(repr(error))

    def _step(self) -> None:
        rng, store = self._random, self._store
        length = rng.randrange(1, LONGEST)
        refs = rng.choice(self._paths)[:length]
        chance = rng.random()
        if chance < 0.5:
            refs = refs[rng.randrange(length) :] if rng.random() < 0.3 else refs
            pages = [memoryview(payload(ref, PAGE_BYTES)) for ref in refs]
            store.write_from(refs, pages)
        elif chance < 0.9:
            buffers = [memoryview(bytearray(PAGE_BYTES)) for _ in refs]
            outcomes = store.read_into(refs, buffers)
            for ref, buffer, outcome in zip(refs, buffers, outcomes, strict=True):
                if outcome is None and bytes(buffer) != payload(ref, PAGE_BYTES):
                    self.wrong.append("a page came back with other bytes")
                if outcome not in (None, FailReason.MISSING):
                    self.wrong.append(f"a read ended with {outcome}")
        elif chance < 0.98:
            store.delete(refs[rng.randrange(length) :])
        else:
            store.clear()
        if store.stats().used_bytes > QUOTA_BYTES:
            self.wrong.append("the quota was exceeded")


@pytest.mark.parametrize("seed", range(3))
def test_threads_on_a_flaky_disk_leave_books_that_agree_with_it(tmp_path, monkeypatch, seed):
    paths = [path_refs(path, LONGEST, PAGE_BYTES) for path in range(PATHS)]
    directory = tmp_path / "store"
    store = FileStore(directory, PAGE_BYTES, QUOTA_BYTES, segment_bytes=256 << 10)
    monkeypatch.setattr(store, "_chunk_pages", 40)
    monkeypatch.setattr(store, "_run_pages", 4)
    with monkeypatch.context() as weak:
        weak.setattr(os, "pwritev", FlakyDisk(seed, os.pwritev))
        users = [User(store, paths, 100 * seed + number) for number in range(4)]
        for user in users:
            user.start()
        for user in users:
            user.join()
    assert [wrong for user in users for wrong in user.wrong] == []

    store._places.clear_again()
    index, segments = store._books.index, store._space.segments
    indexed = {entry.place: key for key, entry in index.pages.items()}
    free = set(store._space._free)
    on_disk = {}
    for number, segment in segments.items():
        headers, broken = unpack_header_table(segment.read_header_table())
        assert not broken
        on_disk |= {(number, slot): header.ref.key for slot, header in headers.items()}
    assert on_disk == indexed
    assert free.isdisjoint(indexed)
    assert len(free) + len(indexed) == sum(segment.slots for segment in segments.values())
    assert not any(entry.readers for entry in index.pages.values())
    held = set(index.pages)
    store.close()
    with FileStore(directory, PAGE_BYTES, QUOTA_BYTES, segment_bytes=256 << 10) as reopened:
        assert set(reopened._books.index.pages) == held
