"""A disk that is full: stores decline with a reason, reads go on."""

import errno
import os
import subprocess

import pytest
from storage_disk import PAGE_BYTES, open_small, segment_bytes_for

from kvtiers.storage.file.segment import Segment
from kvtiers.testing.storage_contract import path_refs, payload, read, write
from kvtiers.types import FailReason

DISK_BYTES = 1 << 20


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(mount)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a tmpfs here: {error}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def occupy(disk, leave_bytes):
    """Fill the disk with somebody else's file, up to `leave_bytes`."""
    status = os.statvfs(disk)
    with (disk / "other").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - leave_bytes)


def test_a_disk_smaller_than_the_quota_is_used_as_far_as_it_goes(small_disk):
    directory = small_disk / "store"
    with open_small(directory, quota_bytes=100 << 20, slots=1000) as store:
        for path in range(40):
            assert write(store, path_refs(path, 5, PAGE_BYTES), PAGE_BYTES) == [None] * 5
        stats = store.stats()
        assert stats.used_bytes <= DISK_BYTES
        assert stats.pages >= 50
        assert stats.pages + stats.evicted_pages == 200
        last = path_refs(39, 5, PAGE_BYTES)
        assert read(store, last, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in last]


def test_without_room_for_a_single_page_writes_are_declined(small_disk):
    occupy(small_disk, leave_bytes=8192)
    with open_small(small_disk / "store", slots=8) as store:
        refs = path_refs(0, 3, PAGE_BYTES)
        assert write(store, refs, PAGE_BYTES)[0] is FailReason.QUOTA
        assert store.exists_prefix(refs) == 0
        assert store.stats().pages == 0


def test_reads_go_on_when_others_have_filled_the_disk(small_disk):
    with open_small(small_disk / "store", slots=8) as store:
        first = path_refs(0, 8, PAGE_BYTES)
        assert write(store, first, PAGE_BYTES) == [None] * 8
        occupy(small_disk, leave_bytes=0)
        assert read(store, first, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in first]
        longer = path_refs(0, 12, PAGE_BYTES, shared_pages=0)
        assert write(store, longer, PAGE_BYTES)[8] is FailReason.QUOTA
        assert store.exists_prefix(longer) == 8
        # What is cold makes way, as under a quota of what there is.
        other = path_refs(1, 2, PAGE_BYTES)
        assert write(store, other, PAGE_BYTES) == [None, None]
        assert store.exists_prefix(longer) == 6


def test_a_disk_that_fills_under_a_write_declines_it_and_keeps_the_rest(tmp_path, monkeypatch):
    """Where a file system cannot preallocate, a write itself may find the disk full."""
    segment_bytes = segment_bytes_for(16)
    with open_small(tmp_path / "store", segment_bytes=segment_bytes) as store:
        first = path_refs(0, 4, PAGE_BYTES)
        assert write(store, first, PAGE_BYTES) == [None] * 4

        def disk_full(segment, first_slot, buffers):
            raise OSError(errno.ENOSPC, "no space left on device")

        monkeypatch.setattr(Segment, "write_pages", disk_full)
        other = path_refs(1, 2, PAGE_BYTES)
        assert write(store, other, PAGE_BYTES)[0] is FailReason.QUOTA
        assert store.exists_prefix(other) == 0
        assert read(store, first, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in first]
        monkeypatch.undo()
        assert write(store, other, PAGE_BYTES) == [None, None]


def test_a_file_system_that_cannot_preallocate_is_used_all_the_same(tmp_path, monkeypatch):
    def refuse(fd, offset, length):
        raise OSError(errno.EOPNOTSUPP, "operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    refs = path_refs(0, 4, PAGE_BYTES)
    with open_small(tmp_path / "store") as store:
        assert write(store, refs, PAGE_BYTES) == [None] * 4
    with open_small(tmp_path / "store") as store:
        assert read(store, refs, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in refs]
