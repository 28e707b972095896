"""Damage to the files of a store: a miss, counted, and never wrong data."""

import shutil
import threading

import pytest
from storage_disk import PAGE_BYTES, flip, only_segment, open_small

from kvtiers.storage.file.directory import segment_files
from kvtiers.storage.file.format import HEADER_BYTES, SUPERBLOCK_BYTES, Geometry
from kvtiers.storage.file.segment import Segment
from kvtiers.testing.storage_contract import path_refs, payload, read, write
from kvtiers.types import FailReason

PAGES = 4
GEOMETRY = Geometry(PAGE_BYTES, 16)
HEADER_FIELDS = {
    "magic": 0,
    "version": 8,
    "payload length": 16,
    "depth": 24,
    "sequence": 32,
    "stored at": 40,
    "key": 48,
    "parent": 80,
    "identity": 112,
    "payload checksum": 144,
    "padding": 170,
    "header checksum": 240,
}
PAYLOAD_BYTES = {"first": 0, "middle": PAGE_BYTES // 2, "last": PAGE_BYTES - 1}


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def refs():
    return path_refs(0, PAGES, PAGE_BYTES)


@pytest.fixture
def filled(directory, refs):
    """A directory with a path of four pages in slots 0 to 3, closed."""
    with open_small(directory) as store:
        assert write(store, refs, PAGE_BYTES) == [None] * PAGES
    return only_segment(directory)


def header_offset(slot):
    return SUPERBLOCK_BYTES + slot * HEADER_BYTES


def payload_offset(slot):
    return GEOMETRY.data_offset + slot * GEOMETRY.slot_bytes


@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_header_damaged_while_the_store_is_closed_is_a_counted_miss(
    field, filled, directory, refs
):
    flip(filled, header_offset(2) + HEADER_FIELDS[field])
    with open_small(directory) as store:
        assert store.stats().integrity_failures == 1
        assert store.exists_prefix(refs) == 2
        assert read(store, refs, PAGE_BYTES)[2] is FailReason.MISSING


@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_header_damaged_under_an_open_store_is_a_counted_miss(field, directory, refs):
    with open_small(directory) as store:
        write(store, refs, PAGE_BYTES)
        flip(only_segment(directory), header_offset(2) + HEADER_FIELDS[field])
        got = read(store, refs, PAGE_BYTES)
        assert got[2] is FailReason.INTEGRITY
        assert [got[i] for i in (0, 1, 3)] == [payload(refs[i], PAGE_BYTES) for i in (0, 1, 3)]
        assert store.stats().integrity_failures == 1
        assert store.exists_prefix(refs) == 2


@pytest.mark.parametrize("where", PAYLOAD_BYTES)
def test_a_damaged_page_is_a_counted_miss_and_is_forgotten(where, filled, directory, refs):
    flip(filled, payload_offset(1) + PAYLOAD_BYTES[where])
    with open_small(directory) as store:
        assert read(store, refs, PAGE_BYTES)[1] is FailReason.INTEGRITY
        assert store.stats().integrity_failures == 1
        assert read(store, refs[1:2], PAGE_BYTES) == [FailReason.MISSING]
        assert store.exists_prefix(refs) == 1
    with open_small(directory) as store:
        assert store.exists_prefix(refs) == 1


def test_a_damaged_page_that_is_written_again_finds_its_children(filled, directory, refs):
    flip(filled, payload_offset(1))
    with open_small(directory) as store:
        read(store, refs, PAGE_BYTES)
        assert write(store, refs[:2], PAGE_BYTES) == [None, None]
        assert store.exists_prefix(refs) == PAGES
        assert read(store, refs, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in refs]


@pytest.mark.parametrize("offset", range(0, 60, 3))
def test_a_damaged_superblock_makes_the_segment_a_miss(offset, filled, directory, refs):
    flip(filled, offset)
    with open_small(directory) as store:
        got = read(store, refs, PAGE_BYTES)
        assert got in ([FailReason.MISSING] * PAGES, [payload(ref, PAGE_BYTES) for ref in refs])
        if got[0] is FailReason.MISSING:
            assert store.stats().integrity_failures == 1
        assert write(store, refs, PAGE_BYTES) == [None] * PAGES
        assert read(store, refs, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in refs]


def test_damaged_recency_changes_nothing_but_the_order_of_eviction(filled, directory, refs):
    for offset in range(GEOMETRY.recency_offset, GEOMETRY.recency_offset + 64):
        flip(filled, offset, 0xFF)
    with open_small(directory) as store:
        assert read(store, refs, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in refs]
        assert store.stats().integrity_failures == 0
        assert write(store, path_refs(1, 30, PAGE_BYTES), PAGE_BYTES) == [None] * 30


def test_pages_swapped_on_disk_are_never_passed_off_as_each_other(filled, directory, refs):
    with filled.open("r+b") as file:
        first, second = payload_offset(0), payload_offset(1)
        file.seek(first)
        pages = file.read(2 * GEOMETRY.slot_bytes)
        file.seek(first)
        file.write(pages[second - first :] + pages[: second - first])
    with open_small(directory) as store:
        got = read(store, refs[:2], PAGE_BYTES)
        assert got == [FailReason.INTEGRITY] * 2


def test_a_segment_deleted_underneath_is_a_miss_and_the_store_goes_on(filled, directory, refs):
    with open_small(directory) as store:
        filled.unlink()
        assert read(store, refs, PAGE_BYTES) == [FailReason.MISSING] * PAGES
        assert store.exists_prefix(refs) == 0
        assert write(store, refs, PAGE_BYTES) == [None] * PAGES
        assert read(store, refs, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in refs]
    with open_small(directory) as store:
        assert store.exists_prefix(refs) == PAGES


def test_a_directory_deleted_underneath_is_told_once_and_declines_every_write(
    filled, directory, refs, caplog
):
    with open_small(directory) as store:
        shutil.rmtree(directory)
        assert read(store, refs, PAGE_BYTES) == [FailReason.MISSING] * PAGES
        for _ in range(5):
            assert write(store, refs, PAGE_BYTES) == [FailReason.STORAGE] * PAGES
    assert caplog.text.count("cannot grow") == 1
    assert "until the store is opened again" in caplog.text


def test_a_write_to_a_segment_deleted_underneath_is_not_acknowledged(filled, directory, refs):
    with open_small(directory) as store:
        filled.unlink()
        other = path_refs(1, 2, PAGE_BYTES)
        assert write(store, other, PAGE_BYTES)[0] is FailReason.STORAGE
        assert write(store, other, PAGE_BYTES) == [None, None]
        assert store.exists_prefix(refs) == 0


@pytest.mark.parametrize("keep_bytes", [PAGE_BYTES, PAGE_BYTES + 4096, PAGE_BYTES + 100])
def test_a_segment_truncated_under_an_open_store_is_a_miss_beyond_its_end(
    keep_bytes, directory, refs
):
    with open_small(directory) as store:
        write(store, refs, PAGE_BYTES)
        path = only_segment(directory)
        with path.open("r+b") as file:
            file.truncate(payload_offset(0) + keep_bytes)
        got = read(store, refs, PAGE_BYTES)
        assert got[0] == payload(refs[0], PAGE_BYTES)
        assert got[1:] == [FailReason.INTEGRITY] * 3
        assert store.exists_prefix(refs) == 1


@pytest.mark.parametrize("slots", [0, 1, 3])
def test_a_segment_truncated_while_closed_is_a_miss_beyond_its_end(slots, filled, directory, refs):
    with filled.open("r+b") as file:
        file.truncate(payload_offset(slots) + 100)
    with open_small(directory) as store:
        assert store.exists_prefix(refs) == slots
        assert write(store, refs, PAGE_BYTES) == [None] * PAGES
        assert read(store, refs, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in refs]


def test_a_segment_truncated_to_nothing_is_a_miss(filled, directory, refs):
    filled.write_bytes(b"")
    with open_small(directory) as store:
        assert store.exists_prefix(refs) == 0
        assert write(store, refs, PAGE_BYTES) == [None] * PAGES


def test_a_segment_deleted_between_two_pages_of_a_write_acknowledges_neither(
    directory, refs, monkeypatch
):
    write_pages = Segment.write_pages

    def delete_after_the_first(segment, first_slot, buffers):
        write_pages(segment, first_slot, buffers)
        segment.path.unlink(missing_ok=True)

    with open_small(directory) as store:
        monkeypatch.setattr(Segment, "write_pages", delete_after_the_first)
        monkeypatch.setattr(store, "_run_pages", 1)
        assert None not in write(store, refs, PAGE_BYTES)
        assert store.exists_prefix(refs) == 0
        monkeypatch.undo()
        assert write(store, refs, PAGE_BYTES) == [None] * PAGES
        assert read(store, refs, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in refs]
    with open_small(directory) as store:
        assert store.exists_prefix(refs) == PAGES


def test_threads_survive_segments_that_are_deleted_under_them(directory):
    with open_small(directory, slots=4) as store:
        wrong = []

        def work(worker):
            for turn in range(30):
                refs = path_refs(worker * 100 + turn, 6, PAGE_BYTES)
                write(store, refs, PAGE_BYTES)
                for ref, got in zip(refs, read(store, refs, PAGE_BYTES), strict=True):
                    if isinstance(got, bytes) and got != payload(ref, PAGE_BYTES):
                        wrong.append((worker, turn, ref.depth))
                if turn % 7 == worker:
                    for path in segment_files(directory).values():
                        path.unlink(missing_ok=True)

        workers = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not wrong
        last = path_refs(999, 3, PAGE_BYTES)
        while write(store, last, PAGE_BYTES) != [None] * 3:
            pass  # each failed attempt finds one more deleted file
        assert read(store, last, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in last]
