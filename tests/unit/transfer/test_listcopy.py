"""The list copy joins what continues, falls back without a compiler, and says so once."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from kvtiers.errors import ConfigError
from kvtiers.transfer import listcopy
from kvtiers.transfer.listcopy import NATIVE_AVAILABLE, Implementation, PoolCopier
from kvtiers.transfer.pools import DevicePool, HostPool
from kvtiers.types import PoolSpec

native = pytest.mark.skipif(not NATIVE_AVAILABLE, reason="_copy was not built")


def one_plane(slots: int = 16, plane_bytes: int = 64) -> tuple[DevicePool, HostPool]:
    spec = PoolSpec("kv", plane_bytes)
    plane = np.random.default_rng(0).integers(0, 256, (slots, plane_bytes), np.uint8)
    device = DevicePool(spec, [plane], [0])
    return device, HostPool.like(device, slots)


def slots(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@native
def test_fragments_that_continue_each_other_on_both_sides_are_one_copy() -> None:
    device, host = one_plane()
    copier = PoolCopier(device, host, Implementation.NATIVE)
    assert copier.backup(slots(2, 3, 4, 9, 10), slots(0, 1, 2, 3, 4)) == 2
    assert copier.backup(slots(2, 3, 4), slots(7, 6, 5)) == 3
    expected = device.planes[0][[2, 3, 4, 9, 10, 4, 3, 2]]
    assert np.array_equal(host.memory[:8], expected)
    assert not host.memory[8:].any()


@native
def test_an_empty_copy_copies_nothing() -> None:
    copier = PoolCopier(*one_plane(), Implementation.NATIVE)
    assert copier.backup(slots(), slots()) == 0


@native
@pytest.mark.parametrize("plane_bytes", [1, 63, 4095, 4096, 4097, 9000])
@pytest.mark.parametrize("shift", [0, 1, 15, 63])
def test_every_byte_arrives_at_any_size_and_alignment(plane_bytes: int, shift: int) -> None:
    spec = PoolSpec("kv", plane_bytes)
    rng = np.random.default_rng(plane_bytes)
    memory = rng.integers(0, 256, (3, plane_bytes + 64), np.uint8)
    device = DevicePool(spec, [memory[:, shift : shift + plane_bytes]], [0])
    host = HostPool.like(device, 5)
    PoolCopier(device, host, Implementation.NATIVE).backup(slots(2, 0), slots(1, 3))
    assert np.array_equal(host.memory[[1, 3]], device.planes[0][[2, 0]])
    assert not host.memory[[0, 2, 4]].any()
    copier = PoolCopier(device, host, Implementation.NATIVE)
    before = memory.copy()
    copier.load_layer[0](slots(1), slots(1))
    before[1, shift : shift + plane_bytes] = before[2, shift : shift + plane_bytes]
    assert np.array_equal(memory, before), "nothing beside the page was touched"


@native
def test_malformed_calls_are_refused_by_the_native_part() -> None:
    table = np.zeros((1, 5), np.uint64)
    with pytest.raises(ValueError, match="rows of five uint64"):
        listcopy._copy.copy_rows(table.tobytes()[:-1], slots(), slots(), True)
    with pytest.raises(ValueError, match="one per page"):
        listcopy._copy.copy_rows(table, slots(1), slots(), True)


def test_without_a_compiler_numpy_copies_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listcopy, "NATIVE_AVAILABLE", False)
    listcopy.default_implementation.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            chosen = [listcopy.default_implementation() for _ in range(3)]
        assert chosen == [Implementation.NUMPY] * 3
        assert len(caplog.records) == 1
        assert "reinstall kvtiers" in caplog.text
        with pytest.raises(ConfigError, match="native list copy was asked for"):
            PoolCopier(*one_plane(), Implementation.NATIVE)
    finally:
        listcopy.default_implementation.cache_clear()
