"""Every store of this package through the one suite, the file store in each of its modes."""

import errno
import os

import pytest

from kvtiers.storage import FileStore, MemoryStore, PageStore
from kvtiers.storage.file.directory import DIRECTORY_OVERHEAD_BYTES
from kvtiers.storage.file.format import Geometry
from kvtiers.storage.file.space import segment_cost_bytes
from kvtiers.testing.storage_contract import StorageContract


class TestMemoryStore(StorageContract):
    def open_store(self, quota_bytes: int = 0) -> PageStore:
        return MemoryStore(self.page_bytes, quota_bytes)


class TestFileStore(StorageContract):
    outlives_process = True
    sync = False

    def quota_bytes(self, pages: int) -> int:
        # Two segments, so that pages of one path lie in both.
        half = segment_cost_bytes(Geometry(self.page_bytes, (pages + 1) // 2))
        return DIRECTORY_OVERHEAD_BYTES + 2 * half

    def open_store(self, quota_bytes: int = 0) -> PageStore:
        segment_bytes = quota_bytes // 2 if quota_bytes else 8 * self.page_bytes
        return FileStore(
            self.directory,
            self.page_bytes,
            quota_bytes,
            sync=self.sync,
            segment_bytes=segment_bytes,
        )


class TestFileStoreWithPagesThatAreNoMultipleOfABlock(TestFileStore):
    page_bytes = 23_040


class TestFileStoreWithPagesSmallerThanABlock(TestFileStore):
    page_bytes = 100


class TestFileStoreThatSurvivesPowerLoss(TestFileStore):
    sync = True


class TestFileStoreWithoutDirectIO(TestFileStore):
    """As on a file system that refuses the flag."""

    @pytest.fixture(autouse=True)
    def _refuse_direct_io(self, monkeypatch):
        open_file = os.open

        def refuse(path, flags, *args, **kwargs):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct I/O here")
            return open_file(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)


class TestFileStoreWithoutDirectIOAndOddPages(TestFileStoreWithoutDirectIO):
    page_bytes = 23_040
