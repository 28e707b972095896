"""Storage comes, goes and is emptied while requests are served, whatever its disk does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from engine_clients import CONFIG, MODEL, SECONDS, end_of, request

from kvtiers.engine import parts as engine_parts
from kvtiers.engine.codec import TokenizerCodec
from kvtiers.engine.config import EngineConfig
from kvtiers.engine.engine import LLMEngine
from kvtiers.engine.messages import FinishReason
from kvtiers.engine.models import model_directory
from kvtiers.engine.parts import assemble, file_store
from kvtiers.engine.pools import KvPools
from kvtiers.engine.served_model import ServedModel, load_plain
from kvtiers.errors import StorageError, StorageLocked
from kvtiers.storage.file import FileStore
from kvtiers.storage.port import PageStore
from kvtiers.testing.faulty_store import FaultyStore
from kvtiers.types import StorageOp, Tier


class Disk:
    """Opens file stores, and holds up what it is told to hold up."""

    def __init__(self) -> None:
        self.held = ""  # "open", "clear" or "close"
        self.reached = threading.Event()
        self.may_go = threading.Event()
        self.store: FaultyStore | None = None

    def open(self, config: EngineConfig, pools: KvPools) -> PageStore:
        self.pass_by("open")
        self.store = HeldUp(file_store(config, pools), self)
        return self.store

    def hold(self, what: str) -> None:
        self.held = what
        self.reached.clear()
        self.may_go.clear()

    def pass_by(self, what: str) -> None:
        if self.held == what:
            self.reached.set()
            assert self.may_go.wait(SECONDS)


class HeldUp(FaultyStore):
    def __init__(self, inner: PageStore, disk: Disk) -> None:
        super().__init__(inner)
        self._disk = disk

    def clear(self) -> int:
        self._disk.pass_by("clear")
        return super().clear()

    def close(self) -> None:
        self._disk.pass_by("close")
        super().close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(MODEL, tmp_path_factory.mktemp("models"))


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return replace(CONFIG, storage_dir=tmp_path / "s", storage_gib=0.05)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def engine(directory: Path, config: EngineConfig, disk: Disk) -> Iterator[LLMEngine]:
    served = ServedModel.of(load_plain(directory, config.dtype))
    codec = TokenizerCodec(directory, served.model.config.vocab_size)
    parts = assemble(config, served, codec.eos_token_ids, open_store=disk.open)
    engine = LLMEngine(config, MODEL, codec, parts)
    engine.start()
    yield engine
    disk.may_go.set()
    if disk.store is not None:
        disk.store.release()
    engine.stop()


def stored(engine: LLMEngine, content: int = 1) -> None:
    assert end_of(engine, request(content)).reason is FinishReason.LENGTH
    assert engine.call_in_loop(lambda parts: parts.controller.drain(SECONDS)).result()


def only_storage_has_it(engine: LLMEngine) -> None:
    for tier in (Tier.DEVICE, Tier.HOST):
        engine.flush(tier)


def storage_hit(engine: LLMEngine) -> int:
    split = end_of(engine, request()).split
    assert split is not None
    return split.storage_hit


@pytest.mark.parametrize("what", ["open", "clear", "close"])
def test_requests_go_on_while_the_disk_holds_a_command_up(
    engine: LLMEngine, disk: Disk, what: str
) -> None:
    stored(engine)
    if what == "open":
        engine.detach_storage()
    command: Any = {
        "open": engine.attach_storage,
        "clear": lambda: engine.flush(Tier.STORAGE),
        "close": engine.detach_storage,
    }[what]
    disk.hold(what)
    with ThreadPoolExecutor(1) as operator:
        done = operator.submit(command)
        assert disk.reached.wait(SECONDS)
        assert end_of(engine, request(2)).reason is FinishReason.LENGTH
        assert not done.done()
        disk.may_go.set()
        done.result(SECONDS)


def test_a_cleared_storage_holds_nothing_and_is_filled_again(engine: LLMEngine) -> None:
    stored(engine)
    assert engine.flush(Tier.STORAGE) >= 2
    only_storage_has_it(engine)
    assert storage_hit(engine) == 0
    assert engine.call_in_loop(lambda parts: parts.controller.drain(SECONDS)).result()
    only_storage_has_it(engine)
    assert storage_hit(engine) == 32


def test_clearing_where_no_storage_is_attached_deletes_nothing(engine: LLMEngine) -> None:
    stored(engine)
    engine.detach_storage()
    assert engine.flush(Tier.STORAGE) == 0
    engine.attach_storage()
    only_storage_has_it(engine)
    assert storage_hit(engine) == 32


def test_a_store_that_hangs_is_closed_by_its_detach(
    engine: LLMEngine, disk: Disk, config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    assert disk.store is not None
    disk.store.hang(StorageOp.WRITE)
    assert end_of(engine, request()).reason is FinishReason.LENGTH
    assert disk.store.wait_for_hanging(1)
    engine.detach_storage()
    assert "a call to it has not returned yet" in caplog.text
    assert end_of(engine, request(2)).reason is FinishReason.LENGTH
    hanging = disk.store
    engine.attach_storage()  # the directory is free: the call had not got as far as the disk
    hanging.release()
    stored(engine, 3)
    assert engine.drain(SECONDS)


def test_a_stop_releases_a_store_that_hangs(
    engine: LLMEngine, disk: Disk, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtiers.engine.engine.CLOSE_SECONDS", 0.05)
    assert disk.store is not None
    disk.store.hang(StorageOp.WRITE)
    assert end_of(engine, request()).reason is FinishReason.LENGTH
    assert disk.store.wait_for_hanging(1)
    engine.stop()
    file_store(config, engine.parts.pools).close()


def test_an_attach_that_fails_leaves_the_directory_to_the_next(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(engine)
    engine.detach_storage()

    def no_memory(*_: object) -> None:
        raise MemoryError("no memory for the staging")

    with monkeypatch.context() as patch:
        patch.setattr(engine_parts, "storage_worker", no_memory)
        with pytest.raises(MemoryError, match="staging"):
            engine.attach_storage()
    engine.attach_storage()
    only_storage_has_it(engine)
    assert storage_hit(engine) == 32


def test_two_attaches_at_once_do_not_meet_in_the_directory(engine: LLMEngine, disk: Disk) -> None:
    engine.detach_storage()
    disk.hold("open")
    with ThreadPoolExecutor(1) as operator:
        first = operator.submit(engine.attach_storage)
        assert disk.reached.wait(SECONDS)
        with pytest.raises(StorageError, match="being attached already"):
            engine.attach_storage()
        disk.may_go.set()
        first.result(SECONDS)


def test_an_engine_that_cannot_be_assembled_leaves_the_directory_to_the_next(
    directory: Path, config: EngineConfig
) -> None:
    served = ServedModel.of(load_plain(directory, config.dtype))
    pools: list[KvPools] = []

    def no_transfer(made: KvPools) -> Any:
        pools.append(made)
        with pytest.raises(StorageLocked):
            file_store(config, made)
        raise MemoryError("no memory for the copies")

    with pytest.raises(MemoryError, match="copies"):
        assemble(config, served, (), make_transfer=no_transfer)
    assert config.storage_dir is not None
    FileStore(config.storage_dir, pools[0].spec.bytes_per_slot).close()
