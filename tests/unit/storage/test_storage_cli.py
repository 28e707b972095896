"""`kvtiers storage`: what it says, as text and as JSON, and with which exit status."""

import json
import os

import pytest
from storage_disk import PAGE_BYTES, flip, only_segment, open_small
from typer.testing import CliRunner

from kvtiers.cli.storage import app
from kvtiers.errors import StorageError, StorageLocked
from kvtiers.storage.file.directory import segment_files
from kvtiers.storage.file.format import Geometry
from kvtiers.testing.storage_contract import path_refs, write


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def refs(directory):
    """A path of six pages in a closed store."""
    refs = path_refs(0, 6, PAGE_BYTES)
    with open_small(directory) as store:
        write(store, refs, PAGE_BYTES)
    return refs


def run(*arguments, status=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


def run_json(*arguments, status=0):
    return json.loads(run(*arguments, "--json", status=status))


def test_ls_says_what_is_in_the_store(directory, refs):
    listed = run_json("ls", directory)
    (identity,) = listed["identities"]
    assert identity["identity"] == refs[0].identity[:4].hex()
    assert identity["pages"] == 6
    assert identity["bytes"] == 6 * PAGE_BYTES
    assert identity["deepest_page"] == 5
    assert identity["pages_by_depth"]["<1"] == 1
    assert identity["pages_by_depth"]["<4"] == 3
    assert sum(identity["pages_by_depth"].values()) == 6
    assert 0 <= identity["newest_seconds"] <= identity["oldest_seconds"] < 600
    assert listed["in_use_by_process"] is None
    (segment,) = listed["segments"]
    assert segment["pages"] == 6
    assert segment["slots"] == 16
    printed = run("ls", directory)
    assert identity["identity"] in printed
    assert "48.0 KiB" in printed


def test_ls_and_check_look_at_a_store_in_use(directory, refs):
    with open_small(directory):
        assert run_json("ls", directory)["in_use_by_process"] == os.getpid()
        assert f"in use by process {os.getpid()}" in run("ls", directory)
        assert run_json("check", directory)["checked_pages"] == 6


def test_ls_tells_identities_and_page_sizes_apart(directory, refs):
    with open_small(directory, page_bytes=4096) as store:
        write(store, path_refs(0, 2, 4096), 4096)
    identities = run_json("ls", directory)["identities"]
    assert [(row["page_bytes"], row["pages"]) for row in identities] == [(8192, 6), (4096, 2)]
    assert identities[0]["identity"] != identities[1]["identity"]


def test_check_of_a_whole_store_exits_0(directory, refs):
    checked = run_json("check", directory)
    assert checked["checked_pages"] == 6
    assert checked["checked_bytes"] == 6 * PAGE_BYTES
    assert checked["damaged"] == []
    assert "0 damaged" in run("check", directory)


def test_check_finds_every_damage_and_exits_1(directory, refs):
    path = only_segment(directory)
    flip(path, Geometry(PAGE_BYTES, 16).data_offset + 2 * PAGE_BYTES)
    flip(path, 4096 + 4 * 256 + 60)
    checked = run_json("check", directory, status=1)
    assert checked["damaged"] == [
        {"file": path.name, "slot": 4, "what": "header"},
        {"file": path.name, "slot": 2, "what": "payload"},
    ]
    assert checked["unreachable_pages"] == 2  # pages 3 and 5
    assert "2 damaged" in run("check", directory, status=1)


def test_check_reports_a_file_that_is_no_segment_any_more(directory, refs):
    path = only_segment(directory)
    path.write_bytes(b"")
    (damage,) = run_json("check", directory, status=1)["damaged"]
    assert damage["file"] == path.name
    assert damage["slot"] is None
    (segment,) = run_json("ls", directory)["segments"]
    assert segment["problem"] == "it does not begin like a segment"
    assert f"{path.name}: it does not begin like a segment" in run("ls", directory)


def test_gc_leaves_a_store_that_check_finds_whole(directory, refs):
    flip(only_segment(directory), Geometry(PAGE_BYTES, 16).data_offset + 2 * PAGE_BYTES)
    (directory / "segment-00000077.kv").write_bytes(b"garbage")
    reclaimed = run_json("gc", directory)
    assert reclaimed["damaged_pages"] == 1
    assert reclaimed["unreachable_pages"] == 3
    assert reclaimed["removed_files"] == 1
    assert run_json("check", directory)["checked_pages"] == 2
    with open_small(directory) as store:
        assert store.exists_prefix(refs) == 2


def test_gc_gives_back_everything_of_an_empty_store(directory, refs):
    with open_small(directory) as store:
        store.clear()
    assert run_json("gc", directory)["removed_files"] == 1
    assert segment_files(directory) == {}
    assert "0 B given back" in run("gc", directory)


def test_gc_handles_every_page_size_of_the_directory(directory, refs):
    with open_small(directory, page_bytes=4096) as store:
        write(store, path_refs(0, 2, 4096), 4096)
    assert run_json("gc", directory)["removed_files"] == 0
    assert run_json("check", directory)["checked_pages"] == 8


def test_gc_refuses_a_store_in_use(directory, refs):
    said = f"in use by process {os.getpid()}, and gc needs it for itself: stop that server"
    with open_small(directory), pytest.raises(StorageLocked, match=said):
        run("gc", directory)


@pytest.mark.parametrize("command", ["ls", "check", "gc"])
def test_a_directory_that_is_no_store_is_refused_and_left_alone(command, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="not a kvtiers store"):
        run(command, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("command", ["ls", "check", "gc"])
def test_a_place_without_a_store_is_told_by_what_it_is(command, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("missing", "there is no such directory"),
        ("file", "is a file; give the directory"),
        ("empty", "is empty: nothing has been stored there"),
    ):
        with pytest.raises(StorageError, match=said):
            run(command, tmp_path / name)


@pytest.mark.parametrize("command", ["ls", "check", "gc"])
def test_a_segment_that_may_not_be_read_is_not_called_damaged(
    command, directory, refs, monkeypatch
):
    # the superuser may read everything, so the answer is made up
    monkeypatch.setattr(os, "access", lambda path, mode: path != only_segment(directory))
    with pytest.raises(StorageError, match=r"closed to this user .*; run this as the user that"):
        run(command, directory)
    assert only_segment(directory).exists()


def test_a_directory_that_may_not_be_listed_is_told(directory, refs, monkeypatch):
    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", closed)
    with pytest.raises(StorageError, match="is closed to this user"):
        run("ls", directory)
