"""What every page store must do, as a suite that any store can be run through.

    class TestMyStore(StorageContract):
        outlives_process = True

        def open_store(self, quota_bytes: int = 0) -> PageStore:
            return MyStore(self.directory, self.page_bytes, quota_bytes)

A quota of `self.quota_bytes(pages)` must hold at least `pages` pages and fewer than twice as many.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtiers.errors import StorageError
from kvtiers.storage.keys import StorageIdentity, page_refs
from kvtiers.storage.port import PageRef, PageStore
from kvtiers.types import FailReason, Namespace, token_key

PAGE_TOKENS = 4


def path_refs(path: int, pages: int, page_bytes: int, *, shared_pages: int = 0) -> list[PageRef]:
    """References to the pages of path number `path`; paths share their first `shared_pages`."""
    identity = StorageIdentity(Namespace("contract"), PAGE_TOKENS, page_bytes, "uint8")
    tokens = np.arange(pages * PAGE_TOKENS)
    tokens[shared_pages * PAGE_TOKENS :] += 1_000_000 * (path + 1)
    return page_refs(identity, token_key(tokens), 0, pages)


def payload(ref: PageRef, page_bytes: int) -> bytes:
    """The one right content of a page: random bytes that follow from its key."""
    return np.random.default_rng(list(ref.key)).bytes(page_bytes)


def write(store: PageStore, refs: Sequence[PageRef], page_bytes: int) -> list[FailReason | None]:
    return store.write_from(refs, [memoryview(payload(ref, page_bytes)) for ref in refs])


def read(store: PageStore, refs: Sequence[PageRef], page_bytes: int) -> list[bytes | FailReason]:
    """Each page's bytes, or why there are none."""
    buffers = [bytearray(page_bytes) for _ in refs]
    outcomes = store.read_into(refs, [memoryview(buffer) for buffer in buffers])
    return [
        bytes(buffer) if outcome is None else outcome
        for buffer, outcome in zip(buffers, outcomes, strict=True)
    ]


class StorageContract(ABC):
    """Subclass it as a pytest class; each test opens the stores it needs and closes them."""

    page_bytes = 8192
    outlives_process = False

    directory: Path
    _opened: list[PageStore]

    @abstractmethod
    def open_store(self, quota_bytes: int = 0) -> PageStore:
        """A store in `self.directory`: a new one, or what was closed there before."""

    def quota_bytes(self, pages: int) -> int:
        return pages * self.page_bytes

    @pytest.fixture(autouse=True)
    def _use_directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "store"

    def _write(self, store: PageStore, refs: Sequence[PageRef]) -> list[FailReason | None]:
        return write(store, refs, self.page_bytes)

    def _read(self, store: PageStore, refs: Sequence[PageRef]) -> list[bytes | FailReason]:
        return read(store, refs, self.page_bytes)

    def _path(self, path: int, pages: int, shared_pages: int = 0) -> list[PageRef]:
        return path_refs(path, pages, self.page_bytes, shared_pages=shared_pages)

    def _contents(self, refs: Sequence[PageRef]) -> list[bytes]:
        return [payload(ref, self.page_bytes) for ref in refs]

    # ---- pages go in and come out
    def test_an_empty_store_holds_nothing(self) -> None:
        store = self.open_store()
        refs = self._path(0, 3)
        assert store.exists_prefix(refs) == 0
        assert self._read(store, refs) == [FailReason.MISSING] * 3
        assert store.stats().pages == 0
        store.close()

    def test_what_was_written_is_found_and_read_back(self) -> None:
        store = self.open_store()
        refs = self._path(0, 20)
        assert self._write(store, refs) == [None] * 20
        assert store.exists_prefix(refs) == 20
        assert self._read(store, refs) == self._contents(refs)
        assert self._read(store, refs[::-1]) == self._contents(refs[::-1])
        assert store.stats().pages == 20
        store.close()

    def test_a_batch_may_be_empty(self) -> None:
        store = self.open_store()
        assert store.write_from([], []) == []
        assert store.read_into([], []) == []
        assert store.exists_prefix([]) == 0
        assert store.delete([]) == 0
        store.close()

    def test_a_missing_page_does_not_disturb_the_others_of_its_batch(self) -> None:
        store = self.open_store()
        here, elsewhere = self._path(0, 2), self._path(1, 1)
        self._write(store, here)
        got = self._read(store, [here[0], elsewhere[0], here[1]])
        assert got == [
            payload(here[0], self.page_bytes),
            FailReason.MISSING,
            payload(here[1], self.page_bytes),
        ]
        store.close()

    def test_exists_prefix_stops_at_the_first_gap(self) -> None:
        store = self.open_store()
        refs = self._path(0, 6)
        self._write(store, refs)
        store.delete([refs[3]])
        assert store.exists_prefix(refs) == 3
        store.close()

    def test_a_page_that_is_there_counts_as_written_and_keeps_its_bytes(self) -> None:
        store = self.open_store()
        refs = self._path(0, 2)
        self._write(store, refs)
        other = [memoryview(bytes(self.page_bytes)) for _ in refs]
        assert store.write_from(refs, other) == [None, None]
        assert self._read(store, refs) == self._contents(refs)
        assert store.stats().pages == 2
        store.close()

    def test_one_page_twice_in_a_batch_is_one_page(self) -> None:
        store = self.open_store()
        (ref,) = self._path(0, 1)
        assert self._write(store, [ref, ref]) == [None, None]
        assert store.stats().pages == 1
        assert self._read(store, [ref]) == self._contents([ref])
        store.close()

    def test_a_page_without_its_parent_is_not_taken(self) -> None:
        store = self.open_store()
        refs = self._path(0, 3)
        assert self._write(store, refs[1:]) == [FailReason.ORPHANED] * 2
        assert store.stats().pages == 0
        store.close()

    def test_another_identity_does_not_find_the_page(self) -> None:
        store = self.open_store()
        key = token_key(np.arange(PAGE_TOKENS))
        names = [
            StorageIdentity(Namespace("m"), PAGE_TOKENS, self.page_bytes, "uint8"),
            StorageIdentity(Namespace("m", salt="a"), PAGE_TOKENS, self.page_bytes, "uint8"),
            StorageIdentity(Namespace("m"), PAGE_TOKENS, self.page_bytes, "int8"),
            StorageIdentity(Namespace("m"), PAGE_TOKENS, self.page_bytes, "uint8", shard="1/2"),
            StorageIdentity(Namespace("m"), PAGE_TOKENS, self.page_bytes, "uint8", pool="swa"),
        ]
        mine, *others = [page_refs(identity, key, 0, 1) for identity in names]
        self._write(store, mine)
        assert [store.exists_prefix(refs) for refs in others] == [0] * len(others)
        assert store.exists_prefix(mine) == 1
        store.close()

    # ---- quota and eviction
    def test_the_quota_holds_while_much_more_is_written(self) -> None:
        quota_bytes = self.quota_bytes(16)
        store = self.open_store(quota_bytes)
        for path in range(12):
            assert self._write(store, self._path(path, 5)) == [None] * 5
            stats = store.stats()
            assert stats.used_bytes <= stats.quota_bytes == quota_bytes
        assert stats.pages + stats.evicted_pages == 60
        assert stats.pages >= 16
        store.close()

    def test_the_least_recently_used_path_leaves_tail_first(self) -> None:
        store = self.open_store(self.quota_bytes(16))
        cold, warm = self._path(0, 7), self._path(1, 7)
        self._write(store, cold)
        self._write(store, warm)
        self._read(store, cold)
        self._read(store, warm)
        more = 2
        while store.stats().evicted_pages == 0:
            self._write(store, self._path(more, 1))
            more += 1
        gone = store.stats().evicted_pages
        assert store.exists_prefix(warm) == 7
        assert store.exists_prefix(cold) == 7 - gone
        store.close()

    def test_a_shared_head_stays_as_long_as_any_child_of_it(self) -> None:
        store = self.open_store(self.quota_bytes(12))
        shared_pages = 4
        for path in range(20):
            self._write(store, self._path(path, 8, shared_pages))
            assert store.exists_prefix(self._path(path, 8, shared_pages)) == 8
        store.close()

    def test_of_a_path_longer_than_the_store_the_head_is_kept(self) -> None:
        store = self.open_store(self.quota_bytes(8))
        refs = self._path(0, 40)
        outcomes = self._write(store, refs)
        kept = outcomes.count(None)
        assert 8 <= kept < 16
        assert outcomes[:kept] == [None] * kept
        assert outcomes[kept] is FailReason.QUOTA
        assert set(outcomes[kept:]) <= {FailReason.QUOTA, FailReason.ORPHANED}
        assert store.exists_prefix(refs) == kept
        assert self._read(store, refs[:kept]) == self._contents(refs[:kept])
        store.close()

    # ---- deleting
    def test_deleted_pages_are_gone_and_make_room(self) -> None:
        store = self.open_store()
        refs = self._path(0, 4)
        self._write(store, refs)
        assert store.delete([*refs[2:], *self._path(1, 2)]) == 2
        assert store.exists_prefix(refs) == 2
        assert self._read(store, refs[2:]) == [FailReason.MISSING] * 2
        assert self._write(store, refs) == [None] * 4
        assert self._read(store, refs) == self._contents(refs)
        store.close()

    def test_clear_deletes_everything_and_the_store_goes_on(self) -> None:
        store = self.open_store()
        refs = self._path(0, 4)
        self._write(store, refs)
        assert store.clear() == 4
        assert store.exists_prefix(refs) == 0
        assert store.stats().pages == 0
        assert self._write(store, refs) == [None] * 4
        assert self._read(store, refs) == self._contents(refs)
        store.close()

    # ---- misuse and life
    def test_a_buffer_of_the_wrong_size_is_refused(self) -> None:
        store = self.open_store()
        refs = self._path(0, 1)
        with pytest.raises(StorageError, match=str(self.page_bytes)):
            store.write_from(refs, [memoryview(bytes(self.page_bytes - 1))])
        with pytest.raises(StorageError):
            store.read_into(refs, [])
        assert store.stats().pages == 0
        store.close()

    def test_a_closed_store_answers_shutdown(self) -> None:
        store = self.open_store()
        refs = self._path(0, 1)
        self._write(store, refs)
        store.close()
        store.close()
        assert self._write(store, refs) == [FailReason.SHUTDOWN]
        assert self._read(store, refs) == [FailReason.SHUTDOWN]
        assert store.exists_prefix(refs) == 0

    def test_what_was_acknowledged_is_found_by_the_next_open(self) -> None:
        if not self.outlives_process:
            pytest.skip("this store does not outlive its process")
        refs = self._path(0, 9)
        store = self.open_store()
        self._write(store, refs)
        store.close()
        store = self.open_store()
        assert store.exists_prefix(refs) == 9
        assert self._read(store, refs) == self._contents(refs)
        store.close()

    # ---- threads
    def test_threads_that_write_and_read_at_once_see_only_right_pages(self) -> None:
        store = self.open_store(self.quota_bytes(32))
        wrong: list[str] = []

        def work(worker: int) -> None:
            for turn in range(15):
                refs = self._path((worker * 7 + turn) % 10, 8, shared_pages=3)
                self._write(store, refs)
                for ref, got in zip(refs, self._read(store, refs), strict=True):
                    if got not in (payload(ref, self.page_bytes), FailReason.MISSING):
                        wrong.append(f"worker {worker} turn {turn}: {got!r:.60}")
                if turn % 5 == 4:
                    store.delete(refs[5:])

        workers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        stats = store.stats()
        assert not wrong
        assert stats.integrity_failures == 0
        assert stats.used_bytes <= stats.quota_bytes
        store.close()
