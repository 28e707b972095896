"""Virtual copies take the time that bytes, bandwidth and latency say, on a clock of ours."""

from __future__ import annotations

import numpy as np
import pytest

from kvtiers.errors import ConfigError, ProtocolError
from kvtiers.events import Copy
from kvtiers.transfer.virtual import Link, VirtualTransfer
from kvtiers.types import PoolSpec, Purpose

POOLS = (PoolSpec("kv", 1000), PoolSpec("draft", 200, follows="kv"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def transfer(clock: Clock) -> VirtualTransfer:
    return VirtualTransfer(
        clock,
        POOLS,
        device_to_host=Link(12_000.0, latency_seconds=0.5),
        host_to_device=Link(24_000.0),
        layers=4,
    )


def copy_of(op_id: int, purpose: Purpose, pages: int) -> Copy:
    slots = np.arange(pages, dtype=np.int32)
    return Copy(op_id, purpose, 0, pages, slots, slots)


def test_a_copy_takes_latency_plus_bytes_over_bandwidth(
    clock: Clock, transfer: VirtualTransfer
) -> None:
    clock.now = 10.0
    transfer.submit([copy_of(1, Purpose.BACKUP, 10)])  # 12,000 bytes, followers included
    assert transfer.next_completion() == 11.5
    clock.now = 11.49
    assert transfer.poll() == []
    clock.now = 11.5
    (done,) = transfer.poll()
    assert (done.pages_ok, done.failure, done.started, done.finished) == (10, None, 10.0, 11.5)
    assert transfer.next_completion() is None


def test_a_link_carries_one_operation_at_a_time_and_both_links_work_at_once(
    clock: Clock, transfer: VirtualTransfer
) -> None:
    transfer.submit([copy_of(1, Purpose.BACKUP, 10)])
    transfer.submit([copy_of(2, Purpose.BACKUP, 10)])
    transfer.submit([copy_of(3, Purpose.LOAD_BACK, 20)])
    clock.now = 100.0
    done = {c.op_id: (c.started, c.finished) for c in transfer.poll()}
    assert done == {3: (0.0, 1.0), 1: (0.0, 1.5), 2: (1.5, 3.0)}


def test_a_merged_operation_pays_latency_once(clock: Clock, transfer: VirtualTransfer) -> None:
    transfer.submit([copy_of(1, Purpose.BACKUP, 4), copy_of(2, Purpose.BACKUP, 6)])
    clock.now = 1.5
    assert [(c.op_id, c.finished) for c in transfer.poll()] == [(1, 1.5), (2, 1.5)]


def test_layers_arrive_evenly(clock: Clock, transfer: VirtualTransfer) -> None:
    transfer.submit([copy_of(1, Purpose.LOAD_BACK, 20)])
    assert [transfer.layer_ready_at([1], layer) for layer in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert transfer.wait_layer([1], 1, timeout_seconds=0.5)
    assert not transfer.wait_layer([1], 1, timeout_seconds=0.4)
    clock.now = 1.0
    transfer.poll()
    assert transfer.layer_ready_at([1], 3) == float("-inf")
    assert transfer.wait_layer([1, 99], 3, timeout_seconds=0)


def test_the_ceilings_are_the_links(transfer: VirtualTransfer) -> None:
    assert transfer.probe() == {"device_to_host": 12_000.0, "host_to_device": 24_000.0}


def test_closing_says_whether_everything_ends_in_time(
    clock: Clock, transfer: VirtualTransfer
) -> None:
    transfer.submit([copy_of(1, Purpose.BACKUP, 10)])
    assert not transfer.close(1.0)
    assert transfer.close(1.5)


def test_purposes_that_are_not_between_device_and_host_are_refused(
    transfer: VirtualTransfer,
) -> None:
    with pytest.raises(ProtocolError, match="backup or load_back"):
        transfer.submit([copy_of(1, Purpose.STORE, 1)])


@pytest.mark.parametrize("args", [(0.0, 0.0), (1.0, -1.0)])
def test_impossible_links_are_refused(args: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="cannot be"):
        Link(*args)
