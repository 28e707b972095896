"""The file store's own promises: owner, permissions, quota, other sizes and formats, errors."""

import logging
import os
import stat
import struct
import subprocess
import sys
import threading

import pytest
from storage_disk import (
    PAGE_BYTES,
    bytes_on_disk,
    only_segment,
    open_small,
    quota_for,
    segment_bytes_for,
)

from kvtiers.errors import ConfigError, StorageError, StorageLocked
from kvtiers.storage import FileStore
from kvtiers.storage.file.directory import segment_files
from kvtiers.storage.file.format import checksum
from kvtiers.storage.file.segment import Segment
from kvtiers.testing.storage_contract import path_refs, payload, read, write
from kvtiers.types import FailReason


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "store"


def fill(store, paths, pages=4, page_bytes=PAGE_BYTES):
    for path in paths:
        assert write(store, path_refs(path, pages, page_bytes), page_bytes) == [None] * pages


# ---- owner and permissions


def test_a_second_owner_is_refused_with_the_first_ones_process(directory):
    with open_small(directory):
        with pytest.raises(StorageLocked, match=f"in use by process {os.getpid()}"):
            open_small(directory)
        program = (
            "import sys; from kvtiers.storage import FileStore; from kvtiers.errors import *\n"
            "try: FileStore(sys.argv[1], 8192)\n"
            "except StorageLocked as error: print(error)\n"
        )
        other = subprocess.run(
            [sys.executable, "-c", program, str(directory)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert f"in use by process {os.getpid()}" in other.stdout
    open_small(directory).close()


def test_only_the_owner_may_look_into_directory_and_files(directory):
    directory.mkdir(mode=0o755)
    old_mask = os.umask(0)
    try:
        with open_small(directory) as store:
            fill(store, [0])
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {0o600}


def test_a_directory_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("ten years of work")
    mode = tmp_path.stat().st_mode
    with pytest.raises(StorageError, match="not a kvtiers store"):
        FileStore(tmp_path, PAGE_BYTES)
    assert tmp_path.stat().st_mode == mode
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_the_place_of_the_directory_is_a_clear_error(tmp_path):
    (tmp_path / "store").write_text("")
    with pytest.raises(StorageError, match="cannot be used as a store"):
        FileStore(tmp_path / "store", PAGE_BYTES)


def test_what_a_crashed_creation_left_is_removed(directory):
    open_small(directory).close()
    draft = directory / "segment-00000009.tmp"
    draft.write_bytes(bytes(4096))
    open_small(directory).close()
    assert not draft.exists()


def test_settings_that_make_no_sense_are_refused(directory):
    with pytest.raises(ConfigError, match="the least is"):
        FileStore(directory, PAGE_BYTES, 4096)
    with pytest.raises(ConfigError, match="positive"):
        FileStore(directory, 0)
    with pytest.raises(ConfigError, match="positive"):
        FileStore(directory, PAGE_BYTES, write_bytes_per_second=0)


def test_a_store_that_was_refused_leaves_the_directory_unlocked(directory):
    with pytest.raises(ConfigError):
        FileStore(directory, PAGE_BYTES, 4096)
    open_small(directory).close()


# ---- quota


def test_the_directory_never_takes_more_than_the_quota(directory):
    quota_bytes = quota_for(8, 8, 3)
    with open_small(directory, quota_bytes, slots=8) as store:
        for path in range(20):
            fill(store, [path])
            assert bytes_on_disk(directory) <= store.stats().used_bytes <= quota_bytes


def test_quota_is_used_to_the_last_page_that_fits(directory):
    with open_small(directory, quota_for(8, 8), slots=8) as store:
        fill(store, range(4))
        assert store.stats().pages == 16
        assert store.stats().evicted_pages == 0


@pytest.mark.parametrize("slots_left", [(8, 8), (8,), (3,)])
def test_a_lowered_quota_holds_from_the_next_open_on(slots_left, directory):
    with open_small(directory, slots=8) as store:
        fill(store, range(6))  # 24 pages in three segments
    quota_bytes = quota_for(*slots_left)
    with open_small(directory, quota_bytes, slots=8) as store:
        assert bytes_on_disk(directory) <= quota_bytes
        pages = store.stats().pages
        assert pages == (sum(slots_left) if slots_left != (3,) else 0)
        held = [store.exists_prefix(path_refs(path, 4, PAGE_BYTES)) for path in range(6)]
        assert sum(held) == pages  # no page is held that cannot be reached
        assert held == sorted(held)  # the least recently written went first
        for path, found in enumerate(held):
            refs = path_refs(path, 4, PAGE_BYTES)[:found]
            assert read(store, refs, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in refs]
        fill(store, [7], pages=3)
        assert bytes_on_disk(directory) <= quota_bytes


def test_pages_that_were_used_are_kept_over_a_restart(directory):
    quota_bytes = quota_for(12)
    with open_small(directory, quota_bytes, slots=12) as store:
        fill(store, [0, 1, 2])
        read(store, path_refs(0, 4, PAGE_BYTES), PAGE_BYTES)
    with open_small(directory, quota_bytes, slots=12) as store:
        fill(store, [3])
        held = [store.exists_prefix(path_refs(path, 4, PAGE_BYTES)) for path in range(4)]
        assert held == [4, 0, 4, 4]


# ---- other page sizes and formats in one directory


def test_pages_of_another_size_are_kept_unread_while_there_is_room(directory):
    with open_small(directory) as store:
        fill(store, [0])
    with open_small(directory, page_bytes=4096) as store:
        assert store.stats().pages == 0
        fill(store, [0], page_bytes=4096)
    with open_small(directory) as store:
        refs = path_refs(0, 4, PAGE_BYTES)
        assert read(store, refs, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in refs]


def test_files_of_no_use_are_told_once_at_the_start(directory, caplog):
    with open_small(directory, slots=4) as store:
        fill(store, [0, 1])
    assert not caplog.records
    with open_small(directory, page_bytes=2 * PAGE_BYTES):
        (told,) = [record.getMessage() for record in caplog.records]
    assert "2 of its files" in told
    assert "another size" in told


def test_pages_of_another_size_count_and_make_way_first(directory):
    with open_small(directory, slots=8) as store:
        fill(store, [0, 1])
        before_bytes = store.stats().used_bytes
    quota_bytes = before_bytes + segment_bytes_for(8, page_bytes=4096)
    options = {"slots": 8, "page_bytes": 4096}
    with open_small(directory, quota_bytes, **options) as store:
        assert store.stats().used_bytes >= only_segment(directory).stat().st_size
        for path in range(8):
            fill(store, [path], page_bytes=4096)
            assert bytes_on_disk(directory) <= quota_bytes
        assert store.stats().pages > 8
    with open_small(directory, slots=8) as store:
        assert store.stats().pages == 0


def test_a_segment_of_another_format_is_a_miss_and_is_not_counted_as_damage(directory):
    with open_small(directory) as store:
        fill(store, [0])
    path = only_segment(directory)
    raw = bytearray(path.read_bytes())
    covered_bytes = struct.calcsize("<8sIIQQQ")
    raw[8:12] = (2).to_bytes(4, "little")
    raw[covered_bytes : covered_bytes + 16] = checksum(bytes(raw[:covered_bytes]))
    path.write_bytes(raw)
    with open_small(directory) as store:
        assert store.exists_prefix(path_refs(0, 4, PAGE_BYTES)) == 0
        assert store.stats().integrity_failures == 0
        fill(store, [0])
    assert len(segment_files(directory)) == 2
    with open_small(directory) as store:
        assert store.clear() == 4
    assert path not in segment_files(directory).values()


# ---- wear, disk errors, concurrency


def test_writes_over_the_cap_are_declined_until_time_has_passed(directory):
    now = 0.0
    options = {"write_bytes_per_second": PAGE_BYTES, "write_burst_seconds": 2.0}
    with open_small(directory, clock=lambda: now, **options) as store:
        refs = path_refs(0, 5, PAGE_BYTES)
        outcomes = write(store, refs, PAGE_BYTES)
        assert outcomes[:3] == [None, None, FailReason.QUOTA]
        now = 1.0
        assert write(store, refs, PAGE_BYTES)[:4] == [None, None, None, FailReason.QUOTA]
        now = 100.0
        assert write(store, refs, PAGE_BYTES) == [None] * 5


def test_a_write_error_fails_its_page_and_its_children_and_nothing_else(directory, monkeypatch):
    with open_small(directory) as store:
        fill(store, [0])
        write_pages = Segment.write_pages

        def fail_slot_5(segment, first_slot, buffers):
            if first_slot <= 5 < first_slot + len(buffers):
                raise OSError(5, "input/output error")
            write_pages(segment, first_slot, buffers)

        monkeypatch.setattr(Segment, "write_pages", fail_slot_5)
        monkeypatch.setattr(store, "_run_pages", 1)
        refs = path_refs(1, 4, PAGE_BYTES)
        assert write(store, refs, PAGE_BYTES) == [
            None,
            FailReason.STORAGE,
            FailReason.ORPHANED,
            FailReason.ORPHANED,
        ]
        monkeypatch.undo()
        assert store.exists_prefix(refs) == 1
        assert write(store, refs, PAGE_BYTES) == [None] * 4
        assert read(store, refs, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in refs]


def test_a_failed_header_write_is_never_acknowledged_nor_found_later(directory, monkeypatch):
    refs = path_refs(0, 3, PAGE_BYTES)
    with open_small(directory) as store:
        write_headers = Segment.write_headers

        def fail(segment, first_slot, headers):
            if any(headers):
                raise OSError(5, "input/output error")
            write_headers(segment, first_slot, headers)

        monkeypatch.setattr(Segment, "write_headers", fail)
        assert FailReason.STORAGE in write(store, refs, PAGE_BYTES)
        monkeypatch.undo()
        assert store.exists_prefix(refs) == 0
    with open_small(directory) as store:
        assert store.exists_prefix(refs) == 0


def test_a_read_error_is_reported_and_the_page_can_be_stored_again(directory, monkeypatch):
    refs = path_refs(0, 3, PAGE_BYTES)
    with open_small(directory) as store:
        write(store, refs, PAGE_BYTES)
        read_pages = Segment.read_pages

        def fail_slot_1(segment, first_slot, buffers):
            if first_slot <= 1 < first_slot + len(buffers):
                raise OSError(5, "input/output error")
            read_pages(segment, first_slot, buffers)

        monkeypatch.setattr(Segment, "read_pages", fail_slot_1)
        got = read(store, refs, PAGE_BYTES)
        assert got[1] is FailReason.STORAGE
        assert [got[0], got[2]] == [payload(refs[0], PAGE_BYTES), payload(refs[2], PAGE_BYTES)]
        monkeypatch.undo()
        assert write(store, refs, PAGE_BYTES) == [None] * 3
        assert store.exists_prefix(refs) == 3


def test_a_page_that_is_being_read_is_not_overwritten(directory, monkeypatch):
    """A slow reader, and meanwhile the page is deleted and the store is filled twice over."""
    quota_bytes = quota_for(8)
    with open_small(directory, quota_bytes, slots=8) as store:
        refs = path_refs(0, 1, PAGE_BYTES)
        write(store, refs, PAGE_BYTES)
        reading, go_on = threading.Event(), threading.Event()
        read_pages = Segment.read_pages

        def read_slowly(segment, first_slot, buffers):
            reading.set()
            assert go_on.wait(10)
            read_pages(segment, first_slot, buffers)

        monkeypatch.setattr(Segment, "read_pages", read_slowly)
        got = []
        reader = threading.Thread(target=lambda: got.extend(read(store, refs, PAGE_BYTES)))
        reader.start()
        assert reading.wait(10)
        assert store.delete(refs) == 1
        for path in range(1, 20):
            fill(store, [path], pages=1)
        go_on.set()
        reader.join()
        assert got == [payload(refs[0], PAGE_BYTES)]
        assert store.stats().integrity_failures == 0
        assert store.exists_prefix(refs) == 0
        monkeypatch.undo()
        fill(store, [30], pages=8)  # the slot came back


def test_a_call_stuck_in_the_kernel_keeps_the_directory_locked(directory, monkeypatch):
    monkeypatch.setattr("kvtiers.storage.file.store._CLOSE_WAIT_SECONDS", 0.01)
    store = open_small(directory)
    writing, go_on = threading.Event(), threading.Event()
    write_pages = Segment.write_pages

    def hang(segment, first_slot, buffers):
        writing.set()
        assert go_on.wait(10)
        write_pages(segment, first_slot, buffers)

    monkeypatch.setattr(Segment, "write_pages", hang)
    writer = threading.Thread(target=fill, args=(store, [0]))
    writer.start()
    assert writing.wait(10)
    store.close()
    with pytest.raises(StorageLocked):
        open_small(directory)
    go_on.set()
    writer.join()
    with open_small(directory) as again:
        assert again.stats().pages == 4


def test_a_file_system_without_direct_io_is_reported_once(directory, monkeypatch, caplog):
    open_file = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return open_file(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with caplog.at_level(logging.WARNING), open_small(directory, slots=4) as store:
        fill(store, range(4))
        assert not store.direct_io
    assert sum("no direct I/O" in record.message for record in caplog.records) == 1


# ---- reclaiming


def test_reclaim_drops_what_is_damaged_or_unreachable_and_gives_back_segments(directory):
    with open_small(directory, slots=4) as store:
        fill(store, range(5))  # 20 pages in five segments
        store.delete([path_refs(0, 4, PAGE_BYTES)[1]])  # two pages below it are unreachable
        store.delete(path_refs(1, 4, PAGE_BYTES))
        store.delete(path_refs(2, 4, PAGE_BYTES)[2:])
        before_bytes = store.stats().used_bytes
        reclaimed = store.reclaim()
        assert reclaimed.unreachable_pages == 2
        assert reclaimed.damaged_pages == 0
        assert store.stats().used_bytes == before_bytes - reclaimed.freed_bytes
        assert len(segment_files(directory)) == 3  # 11 pages, four to a segment
        held = [store.exists_prefix(path_refs(path, 4, PAGE_BYTES)) for path in range(5)]
        assert held == [1, 0, 2, 4, 4]
        assert store.stats().pages == 11
    with open_small(directory, slots=4) as store:
        for path, found in enumerate(held):
            refs = path_refs(path, 4, PAGE_BYTES)[:found]
            assert read(store, refs, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in refs]
