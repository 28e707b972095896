"""Trouble around the files: no descriptors, a directory that changed hands, a disk that refuses.

Each costs at most what it must: nothing healthy is removed, the quota holds, and what was
acknowledged is found again.
"""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
from storage_disk import PAGE_BYTES, bytes_on_disk, open_small, quota_for

from kvtiers.errors import StorageError
from kvtiers.storage.file import maintenance
from kvtiers.storage.file.directory import StoreDirectory, owner_process, segment_files
from kvtiers.storage.file.segment import Segment
from kvtiers.storage.file.space import usual_segment_bytes
from kvtiers.storage.port import PageRef
from kvtiers.testing.storage_contract import path_refs, payload, read, write
from kvtiers.types import FailReason

NO_DESCRIPTOR = OSError(errno.EMFILE, "too many open files")
DISK_ERROR = OSError(errno.EIO, "input/output error")


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "store"


def fill(store, paths, pages=4):
    for path in paths:
        assert write(store, path_refs(path, pages, PAGE_BYTES), PAGE_BYTES) == [None] * pages


def refuse_to_open(monkeypatch, name, error=NO_DESCRIPTOR):
    opened = os.open

    def refuse(path, flags, *arguments, **options):
        if str(path).endswith(name):
            raise error
        return opened(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)


def refuse_to_clear(monkeypatch):
    """Headers cannot be cleared any more, until the returned event is set."""
    works_again = threading.Event()
    clear_header = Segment.clear_header

    def refuse(segment, slot):
        if not works_again.is_set():
            raise DISK_ERROR
        clear_header(segment, slot)

    monkeypatch.setattr(Segment, "clear_header", refuse)
    return works_again


# ---- descriptors


@pytest.mark.parametrize("error", [NO_DESCRIPTOR, DISK_ERROR, PermissionError(errno.EACCES, "no")])
def test_a_segment_that_cannot_be_opened_is_never_taken_for_free_space(
    directory, monkeypatch, error
):
    with open_small(directory, slots=4) as store:
        fill(store, range(3))
    files = segment_files(directory)
    assert len(files) == 3
    with monkeypatch.context() as broken:
        refuse_to_open(broken, "segment-00000002.kv", error)
        with pytest.raises(StorageError, match=r"segment-00000002\.kv cannot be opened"):
            open_small(directory, slots=4)
        with pytest.raises(StorageError, match="nothing was removed"):
            maintenance.reclaim(directory)
    assert segment_files(directory) == files
    with open_small(directory, slots=4) as store:
        assert store.stats().pages == 12


def test_a_segment_that_cannot_be_opened_after_its_creation_leaves_no_file(directory, monkeypatch):
    quota_bytes = quota_for(4, 4)
    with open_small(directory, quota_bytes, slots=4) as store:
        fill(store, [0])
        with monkeypatch.context() as broken:
            refuse_to_open(broken, "segment-00000002.tmp")
            # No room, and not for want of quota; older pages make way.
            assert write(store, path_refs(1, 4, PAGE_BYTES), PAGE_BYTES) == [None] * 4
            assert bytes_on_disk(directory) <= store.stats().used_bytes <= quota_bytes
        assert list(segment_files(directory)) == [1]
        assert not list(directory.glob("*.tmp"))


def test_files_stay_few_enough_for_the_usual_limit_on_descriptors(directory):
    for quota_bytes in (1 << 26, 1 << 30, 1 << 37, 1 << 42):
        assert quota_bytes // usual_segment_bytes(quota_bytes) <= 128
    with open_small(directory, slots=1) as store:
        fill(store, range(64), pages=1)
        assert len(segment_files(directory)) == 64
        fill(store, range(64, 66), pages=1)  # from here on a file has room for two
        assert len(segment_files(directory)) == 65


# ---- a directory that changes hands


def test_a_directory_that_was_made_anew_belongs_to_its_new_owner(directory):
    """`rm -rf` under a running store, and another one starts in the same place."""
    first = open_small(directory, slots=4)
    fill(first, [0])
    shutil.rmtree(directory)
    with open_small(directory, slots=4) as second:
        fill(second, [1, 2])
        files = segment_files(directory)
        for path in (3, 4, 5):  # the first finds its file gone, then tries to make another
            outcomes = write(first, path_refs(path, 4, PAGE_BYTES), PAGE_BYTES)
            assert set(outcomes) <= {FailReason.STORAGE, FailReason.ORPHANED}
        assert segment_files(directory) == files
        for path in (1, 2):
            refs = path_refs(path, 4, PAGE_BYTES)
            assert read(second, refs, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in refs]
    first.close()


def test_who_looks_for_an_owner_does_not_keep_one_from_starting(directory):
    open_small(directory).close()
    over = threading.Event()

    def look():
        while not over.is_set():
            owner_process(directory)

    looking = [threading.Thread(target=look) for _ in range(2)]
    for thread in looking:
        thread.start()
    try:
        for _ in range(20):
            open_small(directory).close()
    finally:
        over.set()
        for thread in looking:
            thread.join()


def test_a_disk_too_full_for_the_owners_name_is_still_owned(directory, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "ftruncate", refuse)
        owned = StoreDirectory.acquire(directory)
    assert owner_process(directory) is not None
    owned.release()
    StoreDirectory.acquire(directory).release()


# ---- headers that cannot be cleared


def test_a_disk_that_refuses_for_a_moment_costs_one_page_and_not_the_store(directory, monkeypatch):
    with open_small(directory, quota_for(16), slots=16) as store:
        fill(store, range(4))
        works_again = refuse_to_clear(monkeypatch)
        outcomes = write(store, path_refs(9, 8, PAGE_BYTES), PAGE_BYTES)
        assert outcomes == [FailReason.STORAGE] * 8
        assert store.stats().pages == 15
        assert store.stats().evicted_pages == 1
        works_again.set()
        assert write(store, path_refs(9, 8, PAGE_BYTES), PAGE_BYTES) == [None] * 8
        assert store.stats().pages == 16
    with open_small(directory, quota_for(16), slots=16) as store:
        assert store.stats().pages == 16


def test_what_could_not_be_cleared_is_not_reported_as_deleted(directory, monkeypatch):
    with open_small(directory, slots=16) as store:
        fill(store, range(2))
        works_again = refuse_to_clear(monkeypatch)
        assert store.delete(path_refs(0, 4, PAGE_BYTES)) == 0
        assert store.clear() == 0
        assert store.exists_prefix(path_refs(0, 4, PAGE_BYTES)) == 0
        works_again.set()  # closing tries again
    with open_small(directory, slots=16) as store:
        assert store.stats().pages == 0


def test_one_slot_that_can_never_be_cleared_holds_up_no_other(directory, monkeypatch):
    clear_header = Segment.clear_header

    def refuse_slot_3(segment, slot):
        if slot == 3:
            raise DISK_ERROR
        clear_header(segment, slot)

    monkeypatch.setattr(Segment, "clear_header", refuse_slot_3)
    with open_small(directory, quota_for(16), slots=16) as store:
        fill(store, range(4))
        for path in range(4, 12):
            write(store, path_refs(path, 4, PAGE_BYTES), PAGE_BYTES)
        assert store.stats().pages == 15
        refs = path_refs(11, 4, PAGE_BYTES)
        assert read(store, refs, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in refs]


# ---- order and promises


def test_a_parent_deleted_during_the_write_orphans_its_children(directory, monkeypatch):
    refs = path_refs(0, 4, PAGE_BYTES)
    with open_small(directory) as store:
        assert write(store, refs[:2], PAGE_BYTES) == [None] * 2
        write_pages = Segment.write_pages

        def delete_the_parent_meanwhile(segment, first_slot, buffers):
            store.delete([refs[1]])
            write_pages(segment, first_slot, buffers)

        monkeypatch.setattr(Segment, "write_pages", delete_the_parent_meanwhile)
        assert write(store, refs[2:], PAGE_BYTES) == [FailReason.ORPHANED] * 2
        monkeypatch.undo()
        assert store.stats().pages == 1
    with open_small(directory) as store:
        assert store.stats().pages == 1


def test_pages_that_move_survive_a_power_loss_before_their_old_file_goes(directory, monkeypatch):
    with open_small(directory, slots=4, sync=True) as store:
        fill(store, range(3))
        store.delete(path_refs(0, 4, PAGE_BYTES)[2:])
    steps = []
    unlink, sync = Path.unlink, Segment.sync

    def note_unlink(path, **options):
        if path.suffix == ".kv":
            steps.append("unlink")
        unlink(path, **options)

    def note_sync(segment):
        steps.append("sync")
        sync(segment)

    monkeypatch.setattr(Path, "unlink", note_unlink)
    monkeypatch.setattr(Segment, "sync", note_sync)
    with open_small(directory, quota_for(4, 4), slots=4) as store:
        assert store.stats().pages == 8
    assert steps == ["sync", "sync", "unlink"]


def test_asking_for_the_size_never_waits_for_the_disk(directory, monkeypatch):
    with open_small(directory, slots=4) as store:
        fill(store, range(2))
    unlinking, go_on = threading.Event(), threading.Event()
    unlink = Path.unlink

    def unlink_slowly(path, **options):
        if path.suffix == ".kv":
            unlinking.set()
            assert go_on.wait(10)
        unlink(path, **options)

    # Pages of another size are in the way, and are removed by a write.
    store = open_small(directory, quota_for(4, 4), page_bytes=2 * PAGE_BYTES)
    monkeypatch.setattr(Path, "unlink", unlink_slowly)
    refs = path_refs(5, 2, 2 * PAGE_BYTES)
    writing = threading.Thread(target=write, args=(store, refs, 2 * PAGE_BYTES))
    writing.start()
    assert unlinking.wait(10)
    asked = threading.Thread(target=store.stats)
    asked.start()
    asked.join(10)
    assert not asked.is_alive()
    assert store.stats().used_bytes <= quota_for(4, 4)
    go_on.set()
    writing.join()
    assert store.exists_prefix(refs) == 2
    store.close()


def test_a_file_in_the_way_that_cannot_be_removed_keeps_counting(directory, monkeypatch):
    with open_small(directory, slots=4) as store:
        fill(store, [0])
    with open_small(directory, page_bytes=2 * PAGE_BYTES) as store:
        before = store.stats().used_bytes
        with monkeypatch.context() as stuck:
            stuck.setattr(Path, "unlink", lambda path, **options: (_ for _ in ()).throw(DISK_ERROR))
            assert store.clear() == 0
        assert store.stats().used_bytes == before
        store.clear()
        assert store.stats().used_bytes < before


def test_a_disk_that_takes_nothing_and_does_not_say_why_is_an_error(directory, monkeypatch):
    with open_small(directory) as store:
        fill(store, [0])
        monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
        outcomes = write(store, path_refs(1, 4, PAGE_BYTES), PAGE_BYTES)
        assert FailReason.STORAGE in outcomes
        assert None not in outcomes
        monkeypatch.undo()


@pytest.mark.parametrize("identity", [b"abc", bytes(32), b"x" * 40])
def test_an_identity_that_the_header_cannot_hold_is_refused(directory, identity):
    with open_small(directory) as store:
        ref = PageRef(b"k" * 32, 0, b"", identity)
        with pytest.raises(StorageError, match="identity"):
            write(store, [ref], PAGE_BYTES)
