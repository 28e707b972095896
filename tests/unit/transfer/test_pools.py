"""Pools lay bytes out as they say, and refuse shapes that contradict their spec."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
import pytest

from kvtiers.errors import ConfigError
from kvtiers.transfer.pools import DevicePool, HostPool
from kvtiers.types import PoolSpec

SPEC = PoolSpec("kv", 24)


def planes(*sizes: int, slots: int = 5) -> list[np.ndarray]:
    return [np.zeros((slots, size), np.uint8) for size in sizes]


def test_host_memory_starts_at_a_page_boundary_and_is_zero() -> None:
    pool = HostPool(SPEC, 1000, (8, 16))
    assert pool.memory.shape == (1000, 24)
    assert pool.memory.ctypes.data % mmap.PAGESIZE == 0
    assert not pool.memory.any()


def test_a_host_page_is_writable_in_place_and_apart_from_its_neighbours() -> None:
    pool = HostPool(SPEC, 3, (8, 16))
    page = pool.page(1)
    page[:] = bytes(range(24))
    assert pool.memory[1].tobytes() == bytes(range(24))
    assert not pool.memory[0].any()
    assert not pool.memory[2].any()


def test_a_host_pool_takes_the_planes_of_its_device_pool() -> None:
    device = DevicePool(SPEC, planes(8, 4, 12), [0, 0, 3])
    host = HostPool.like(device, 7)
    assert (host.slots, host.plane_bytes, host.plane_offsets) == (7, (8, 4, 12), (0, 8, 12))


def test_device_rows_may_lie_apart() -> None:
    memory = np.zeros((5, 64), np.uint8)
    pool = DevicePool(SPEC, [memory[:, :8], memory[:, 32:48]], [0, 1])
    assert pool.slots == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DevicePool(SPEC, [], []), "0 planes and 0 layers"),
        (lambda: DevicePool(SPEC, planes(8, 16), [0]), "2 planes and 1 layers"),
        (lambda: DevicePool(SPEC, planes(8, 8), [0, 1]), "in sum 16; its spec says 24 bytes"),
        (lambda: DevicePool(SPEC, planes(8, 16), [1, 0]), "must ascend"),
        (lambda: DevicePool(SPEC, planes(8, 16), [-1, 0]), "must ascend from 0"),
        (
            lambda: DevicePool(SPEC, [*planes(8), *planes(16, slots=6)], [0, 1]),
            r"have \[5, 6\] slots",
        ),
        (
            lambda: DevicePool(SPEC, [np.zeros((5, 24), np.int8)], [0]),
            "must be uint8 .slots, plane_bytes. with contiguous rows",
        ),
        (
            lambda: DevicePool(SPEC, [np.zeros((5, 48), np.uint8)[:, ::2]], [0]),
            "contiguous rows",
        ),
        (lambda: HostPool(SPEC, 0, (8, 16)), "was given 0 slots"),
        (lambda: HostPool(SPEC, 4, (8, 8)), "its spec says 24 bytes per slot"),
        (lambda: HostPool(SPEC, 4, (24, 0)), "planes of"),
    ],
)
def test_shapes_that_contradict_each_other_are_refused(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
