"""What every transfer that moves bytes must do, over every kind of pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from kvtiers.errors import ConfigError, ProtocolError
from kvtiers.events import Copy, PoolSlots
from kvtiers.transfer.cpu import CpuTransfer
from kvtiers.transfer.listcopy import NATIVE_AVAILABLE, Implementation
from kvtiers.transfer.pools import DevicePool, HostPool
from kvtiers.transfer.port import Completion, Transfer
from kvtiers.types import FailReason, PoolSpec, Purpose, SlotArray, SlotUnit

DEVICE_SLOTS = 24
HOST_SLOTS = 40
LAYERS = 4

# Pool kinds: (specs, planes by pool as (bytes, layer)).
KINDS: dict[str, dict[str, tuple[PoolSpec, list[tuple[int, int]]]]] = {
    "mha_k_and_v": {
        "kv": (PoolSpec("kv", 2 * LAYERS * 96), [(96, i // 2) for i in range(2 * LAYERS)]),
    },
    "planes_large_enough_to_be_streamed": {
        "kv": (PoolSpec("kv", 2 * (4096 + 5003)), [(4096, 0), (5003, 0), (4096, 2), (5003, 2)]),
    },
    "mla_one_latent": {
        "kv": (PoolSpec("kv", LAYERS * 72), [(72, i) for i in range(LAYERS)]),
    },
    "recurrent_state_with_two_buffers": {
        "kv": (PoolSpec("kv", 2 * 64), [(64, 1), (64, 3)]),
        "mamba": (
            PoolSpec("mamba", 2 * (200 + 24), unit=SlotUnit.STATE),
            [(200, 0), (24, 0), (200, 2), (24, 2)],  # temporal and conv of layers 0 and 2
        ),
    },
    "follower": {
        "kv": (PoolSpec("kv", 2 * LAYERS * 32), [(32, i // 2) for i in range(2 * LAYERS)]),
        "draft": (PoolSpec("draft", 2 * 48, follows="kv"), [(48, 0), (48, 0)]),
    },
}


@dataclass
class Rig:
    """Pools of one kind with random device pages, and a transfer over them."""

    transfer: CpuTransfer
    device: dict[str, DevicePool]
    host: dict[str, HostPool]

    def device_page(self, pool: str, slot: int) -> bytes:
        return b"".join(plane[slot].tobytes() for plane in self.device[pool].planes)

    def wipe_device(self) -> None:
        for pool in self.device.values():
            for plane in pool.planes:
                plane[:] = 0xEE


def build(kind: str, implementation: Implementation, seed: int = 0) -> Rig:
    rng = np.random.default_rng(seed)
    device, host = {}, {}
    for name, (spec, planes) in KINDS[kind].items():
        arrays = [rng.integers(0, 256, (DEVICE_SLOTS, size), np.uint8) for size, _ in planes]
        device[name] = DevicePool(spec, arrays, [layer for _, layer in planes])
        host[name] = HostPool.like(device[name], HOST_SLOTS)
    transfer = CpuTransfer(
        list(device.values()), list(host.values()), implementation=implementation
    )
    return Rig(transfer, device, host)


@pytest.fixture(
    params=[
        pytest.param(
            Implementation.NATIVE,
            marks=pytest.mark.skipif(not NATIVE_AVAILABLE, reason="_copy was not built"),
        ),
        Implementation.NUMPY,
    ]
)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=sorted(KINDS))
def rig(request: pytest.FixtureRequest, implementation: Implementation) -> Iterator[Rig]:
    made = build(request.param, implementation)
    yield made
    assert made.transfer.close(5)


def slots(*values: int) -> SlotArray:
    return np.array(values, np.int32)


def copy_of(
    op_id: int,
    purpose: Purpose,
    source: SlotArray,
    target: SlotArray,
    extra: tuple[PoolSlots, ...] = (),
) -> Copy:
    return Copy(op_id, purpose, 0, len(source), source, target, extra=extra)


def collect(transfer: Transfer, count: int, seconds: float = 10) -> list[Completion]:
    done: list[Completion] = []
    end = time.monotonic() + seconds
    while len(done) < count and time.monotonic() < end:
        done += transfer.poll()
        time.sleep(0.0005)
    assert len(done) == count
    return done


def round_trip_slots(rig: Rig) -> tuple[tuple[PoolSlots, ...], tuple[PoolSlots, ...]]:
    """The extra shares of a backup of device (3, 17, 4) and of its load-back to (20, 1, 9)."""
    if "mamba" not in rig.device:
        return (), ()
    down = PoolSlots("mamba", slots(5, 2), slots(30, 31), slots(0, 2))
    up = PoolSlots("mamba", slots(30, 31), slots(11, 7), slots(0, 2))
    return (down,), (up,)


def test_a_page_survives_backup_a_wiped_device_and_loading_into_other_slots(rig: Rig) -> None:
    before = {
        name: [rig.device_page(name, s) for s in ((5, 2) if name == "mamba" else (3, 17, 4))]
        for name in rig.device
    }
    down, up = round_trip_slots(rig)
    rig.transfer.submit([copy_of(1, Purpose.BACKUP, slots(3, 17, 4), slots(8, 0, 39), down)])
    (backed_up,) = collect(rig.transfer, 1)
    assert (backed_up.pages_ok, backed_up.failure) == (3, None)
    rig.wipe_device()

    rig.transfer.submit([copy_of(2, Purpose.LOAD_BACK, slots(8, 0, 39), slots(20, 1, 9), up)])
    for layer in range(rig.transfer.layers):
        assert rig.transfer.wait_layer([2], layer, timeout_seconds=5)
    (loaded,) = collect(rig.transfer, 1)
    assert (loaded.pages_ok, loaded.failure) == (3, None)

    for name, pages in before.items():
        targets = (11, 7) if name == "mamba" else (20, 1, 9)
        assert [rig.device_page(name, s) for s in targets] == pages
    untouched = set(range(DEVICE_SLOTS)) - {20, 1, 9}
    assert all(set(rig.device_page("kv", s)) == {0xEE} for s in untouched)


def test_a_page_on_host_is_the_concatenation_of_its_planes(rig: Rig) -> None:
    down, _ = round_trip_slots(rig)
    rig.transfer.submit([copy_of(1, Purpose.BACKUP, slots(3, 17, 4), slots(8, 0, 39), down)])
    collect(rig.transfer, 1)
    for name in rig.device:
        if name != "mamba":
            assert bytes(rig.host[name].page(39)) == rig.device_page(name, 4)
    if "mamba" in rig.device:
        assert bytes(rig.host["mamba"].page(31)) == rig.device_page("mamba", 2)


def test_every_plane_of_every_page_is_one_copy_call(rig: Rig) -> None:
    down, up = round_trip_slots(rig)
    expected = sum(
        len(pool.planes) * (2 if name == "mamba" else 3) for name, pool in rig.device.items()
    )
    rig.transfer.submit([copy_of(1, Purpose.BACKUP, slots(3, 17, 4), slots(8, 0, 39), down)])
    collect(rig.transfer, 1)
    assert rig.transfer.copy_calls == expected
    rig.transfer.submit([copy_of(2, Purpose.LOAD_BACK, slots(8, 0, 39), slots(20, 1, 9), up)])
    collect(rig.transfer, 1)
    assert rig.transfer.copy_calls == 2 * expected


def test_a_merged_operation_completes_each_of_its_copies_with_one_time(
    implementation: Implementation,
) -> None:
    rig = build("mha_k_and_v", implementation)
    pages = {slot: rig.device_page("kv", slot) for slot in range(6)}
    rig.transfer.submit(
        [
            copy_of(7, Purpose.BACKUP, slots(0, 1), slots(10, 11)),
            copy_of(8, Purpose.BACKUP, slots(2), slots(5)),
            copy_of(9, Purpose.BACKUP, slots(3, 4, 5), slots(20, 22, 21)),
        ]
    )
    done = collect(rig.transfer, 3)
    assert [(c.op_id, c.pages_ok) for c in done] == [(7, 2), (8, 1), (9, 3)]
    assert len({(c.started, c.finished) for c in done}) == 1
    assert done[0].started is not None
    assert done[0].finished is not None
    assert done[0].started <= done[0].finished
    for device_slot, host_slot in zip(range(6), (10, 11, 5, 20, 22, 21), strict=True):
        assert bytes(rig.host["kv"].page(host_slot)) == pages[device_slot]


def test_copies_of_one_direction_run_in_order_of_submission(
    implementation: Implementation,
) -> None:
    rig = build("mla_one_latent", implementation)
    for op_id in range(50):
        rig.transfer.submit([copy_of(op_id, Purpose.BACKUP, slots(op_id % 24), slots(3))])
    assert [c.op_id for c in collect(rig.transfer, 50)] == list(range(50))
    assert bytes(rig.host["kv"].page(3)) == rig.device_page("kv", 49 % 24)


def test_a_layer_is_there_when_waiting_for_it_ends(implementation: Implementation) -> None:
    """Poison the targets, load again and again, and look at a layer the moment its wait ends."""
    rig = build("mha_k_and_v", implementation)
    everything = np.arange(DEVICE_SLOTS, dtype=np.int32)
    rig.transfer.submit([copy_of(0, Purpose.BACKUP, everything, everything)])
    collect(rig.transfer, 1)
    expected = [plane.copy() for plane in rig.device["kv"].planes]
    for op_id in range(1, 60):
        rig.wipe_device()
        rig.transfer.submit([copy_of(op_id, Purpose.LOAD_BACK, everything, everything)])
        for layer in range(rig.transfer.layers):
            assert rig.transfer.wait_layer([op_id], layer, timeout_seconds=5)
            for plane in (2 * layer, 2 * layer + 1):
                assert np.array_equal(rig.device["kv"].planes[plane], expected[plane])
        collect(rig.transfer, 1)


def test_waiting_for_unknown_or_long_ended_copies_returns_at_once(rig: Rig) -> None:
    assert rig.transfer.wait_layer([12345], 0, timeout_seconds=0)
    rig.transfer.submit([copy_of(2, Purpose.LOAD_BACK, slots(8), slots(20))])
    collect(rig.transfer, 1)
    assert rig.transfer.wait_layer([2], rig.transfer.layers - 1, timeout_seconds=0)


def test_a_waiter_is_told_when_the_copy_it_relies_on_failed(
    implementation: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = build("mha_k_and_v", implementation)

    def fail(source: SlotArray, target: SlotArray) -> int:
        raise OSError("injected: the link is down")

    monkeypatch.setitem(rig.transfer._copiers[0].load_layer, 2, fail)
    rig.transfer.submit([copy_of(5, Purpose.LOAD_BACK, slots(1), slots(2))])
    assert not rig.transfer.wait_layer([5], LAYERS - 1, timeout_seconds=5)
    (done,) = collect(rig.transfer, 1)
    assert (done.pages_ok, done.failure) == (0, FailReason.TRANSFER)
    assert (done.started, done.finished) == (None, None)
    assert not rig.transfer.wait_layer([5], 0, timeout_seconds=0), "also after poll told of it"

    monkeypatch.undo()
    rig.transfer.submit([copy_of(6, Purpose.LOAD_BACK, slots(1), slots(2))])
    assert rig.transfer.wait_layer([6], LAYERS - 1, timeout_seconds=5), "the worker lives on"


def test_news_are_announced_from_the_worker(rig: Rig) -> None:
    news = threading.Event()
    rig.transfer.on_completion(news.set)
    rig.transfer.submit([copy_of(1, Purpose.BACKUP, slots(1), slots(1))])
    assert news.wait(5)
    assert [c.op_id for c in rig.transfer.poll()] == [1]


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (slots(DEVICE_SLOTS), slots(0), "device slots 24 to 24 of pool 'kv', which has 24"),
        (slots(0), slots(HOST_SLOTS), "host slots 40 to 40 of pool 'kv', which has 40"),
        (slots(-1), slots(0), "device slots -1 to -1"),
        (slots(0, 1), slots(0), "2 pages, 2 source slots and 1 target slots"),
        (np.array([0], np.int64), slots(0), "needs a contiguous int32 array"),
        (np.arange(8, dtype=np.int32)[::2], slots(0, 1, 2, 3), "needs a contiguous int32"),
    ],
)
def test_slots_that_do_not_exist_are_refused_before_anything_is_copied(
    implementation: Implementation, source: SlotArray, target: SlotArray, message: str
) -> None:
    rig = build("mla_one_latent", implementation)
    with pytest.raises(ProtocolError, match=message):
        rig.transfer.submit([copy_of(1, Purpose.BACKUP, source, target)])
    assert rig.transfer.copy_calls == 0


def test_an_operation_has_one_purpose_between_device_and_host(
    implementation: Implementation,
) -> None:
    rig = build("mla_one_latent", implementation)
    with pytest.raises(ProtocolError, match="one purpose"):
        rig.transfer.submit(
            [
                copy_of(1, Purpose.BACKUP, slots(0), slots(0)),
                copy_of(2, Purpose.LOAD_BACK, slots(0), slots(0)),
            ]
        )
    with pytest.raises(ProtocolError, match="store"):
        rig.transfer.submit([copy_of(3, Purpose.STORE, slots(0), slots(0))])


def test_close_completes_what_has_not_begun_as_failed(implementation: Implementation) -> None:
    rig = build("mla_one_latent", implementation)
    begun, may_end = threading.Event(), threading.Event()
    real = rig.transfer._copiers[0].backup

    def slow(source: SlotArray, target: SlotArray) -> int:
        begun.set()
        may_end.wait(5)
        return real(source, target)

    rig.transfer._copiers[0].backup = slow
    rig.transfer.submit([copy_of(1, Purpose.BACKUP, slots(0), slots(0))])
    rig.transfer.submit([copy_of(2, Purpose.BACKUP, slots(1), slots(1))])
    assert begun.wait(5)
    assert not rig.transfer.close(0.01), "a copy is still running"
    may_end.set()
    assert rig.transfer.close(5)
    assert [(c.op_id, c.failure) for c in rig.transfer.poll()] == [
        (1, None),
        (2, FailReason.SHUTDOWN),
    ]
    with pytest.raises(ProtocolError, match="after close"):
        rig.transfer.submit([copy_of(3, Purpose.BACKUP, slots(1), slots(1))])


def test_pools_must_be_on_both_sides_and_hold_the_same_pages() -> None:
    spec = PoolSpec("kv", 20)
    device = DevicePool(spec, [np.zeros((4, 10), np.uint8) for _ in range(2)], [0, 1])
    with pytest.raises(ConfigError, match="every pool that is copied needs both"):
        CpuTransfer([device], [HostPool(PoolSpec("other", 20), 4, (10, 10))])
    with pytest.raises(ConfigError, match="hold different pages"):
        CpuTransfer([device], [HostPool(spec, 4, (5, 15))])


def test_a_device_that_cannot_time_gives_no_times(
    implementation: Implementation, untimed_event: Callable[..., object]
) -> None:
    rig = build("mla_one_latent", implementation)
    transfer = CpuTransfer(
        list(rig.device.values()),
        list(rig.host.values()),
        implementation=implementation,
        event_class=untimed_event,  # type: ignore[arg-type]
    )
    transfer.submit([copy_of(1, Purpose.BACKUP, slots(1), slots(1))])
    (done,) = collect(transfer, 1)
    assert (done.pages_ok, done.started, done.finished) == (1, None, None)


@pytest.fixture
def untimed_event() -> Iterator[Callable[..., object]]:
    from kvtiers.transfer.timing import reset_timing_probe

    class UntimedEvent:
        def __init__(self, **kwargs: bool) -> None:
            if kwargs.get("enable_timing"):
                raise NotImplementedError("this device has no timers")

        def record(self) -> None: ...

        def elapsed_time(self, later: object, /) -> float:
            raise AssertionError("an untimed event was asked for a time")

    reset_timing_probe()
    yield UntimedEvent
    reset_timing_probe()


def test_both_implementations_give_the_same_bytes() -> None:
    if not NATIVE_AVAILABLE:
        pytest.skip("_copy was not built")
    rng = np.random.default_rng(3)
    pages = rng.permutation(DEVICE_SLOTS).astype(np.int32)
    targets = rng.permutation(HOST_SLOTS)[:DEVICE_SLOTS].astype(np.int32)
    images: list[Sequence[bytes]] = []
    for implementation in Implementation:
        rig = build("follower", implementation, seed=11)
        rig.transfer.submit([copy_of(1, Purpose.BACKUP, pages, targets)])
        collect(rig.transfer, 1)
        rig.wipe_device()
        rig.transfer.submit([copy_of(2, Purpose.LOAD_BACK, targets[:9], pages[9:18])])
        collect(rig.transfer, 1)
        images.append(
            [pool.memory.tobytes() for pool in rig.host.values()]
            + [plane.tobytes() for pool in rig.device.values() for plane in pool.planes]
        )
    assert images[0] == images[1]
