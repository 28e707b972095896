"""Stores by name."""

import pytest

from kvtiers.errors import ConfigError, UnknownName
from kvtiers.storage import FileStore, MemoryStore, known_stores, open_store, register_store, stores


def test_a_name_and_a_location_open_a_store(tmp_path):
    with open_store(f"file:{tmp_path}/a", 4096, 1 << 20, sync=True) as store:
        assert isinstance(store, FileStore)
        assert store.sync
        assert store.stats().quota_bytes == 1 << 20
    assert isinstance(open_store("memory:", 4096), MemoryStore)
    assert isinstance(open_store("memory", 4096), MemoryStore)


def test_a_plain_directory_is_a_file_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for where in (f"{tmp_path}/a", "./b", "../c"):
        with open_store(where, 4096) as store:
            assert isinstance(store, FileStore)
    assert (tmp_path / "a" / "LOCK").exists()
    assert (tmp_path / "b" / "LOCK").exists()


def test_an_unknown_store_lists_the_known_ones():
    with pytest.raises(UnknownName, match="unknown store 's3'; known: file, memory"):
        open_store("s3://bucket", 4096)


def test_a_file_store_needs_a_directory():
    with pytest.raises(ConfigError, match="file:DIRECTORY"):
        open_store("file:", 4096)


def test_a_registered_store_is_opened_by_its_name_and_only_once(monkeypatch):
    monkeypatch.setattr(stores, "_OPENERS", dict(stores._OPENERS))
    opened = []

    def opener(location, page_bytes, quota_bytes, **options):
        opened.append((location, page_bytes, quota_bytes, options))
        return MemoryStore(page_bytes, quota_bytes)

    register_store("mine", opener)
    open_store("mine:host:7000", 4096, 8192, colour="blue")
    assert opened == [("host:7000", 4096, 8192, {"colour": "blue"})]
    assert known_stores() == ["file", "memory", "mine"]
    with pytest.raises(ConfigError, match="registered already"):
        register_store("mine", opener)
