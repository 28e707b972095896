"""Storage in virtual time: what it holds, how long it takes, and how an order ends."""

import math

import numpy as np
import pytest

from kvtiers.errors import ProtocolError
from kvtiers.events import Copy, Lookup
from kvtiers.planner.virtual_clock import VirtualClock
from kvtiers.planner.virtual_storage import VirtualStorage
from kvtiers.transfer.virtual import Link
from kvtiers.types import FailReason, Namespace, Purpose, StorageOp, token_key

NAMESPACE = Namespace("m")
PAGE = 4


def path(*pages: int) -> bytes:
    return token_key(np.repeat(pages, PAGE))


class World:
    def __init__(self, capacity: float = math.inf) -> None:
        self.clock = VirtualClock()
        self.calls: list[tuple[str, float, float, int]] = []
        self.storage = VirtualStorage(
            self.clock,
            capacity_pages=capacity,
            page_tokens=PAGE,
            page_bytes=100,
            read=Link(100.0, 0.5),  # one page a second, half a second of latency
            write=Link(50.0),
            observe=lambda *call: self.calls.append(call),
        )
        self.next_id = 0

    def copy(self, purpose: Purpose, key: bytes, first: int = 0) -> int:
        self.next_id += 1
        pages = len(key) // (4 * PAGE) - first
        order = Copy(self.next_id, purpose, first, pages, None, None, NAMESPACE, key)
        (self.storage.store if purpose is Purpose.STORE else self.storage.prefetch)(order)
        return self.next_id

    def after(self, seconds: float) -> list[tuple[StorageOp, int, int, FailReason | None]]:
        self.clock.advance_to(self.clock() + seconds)
        return [(r.op, r.order_id, r.pages, r.failure) for r in self.storage.poll()]

    def found(self, key: bytes, first: int = 0, namespace: Namespace = NAMESPACE) -> int:
        pages = len(key) // (4 * PAGE) - first
        self.storage.lookup(Lookup(7, namespace, key, first, pages))
        ((op, _, found, failure),) = self.after(0.5)
        assert (op, failure) == (StorageOp.EXISTS, None)
        return found


def test_what_was_stored_is_found_as_far_as_the_prefix_agrees() -> None:
    world = World()
    order = world.copy(Purpose.STORE, path(1, 2, 3))
    assert world.storage.next_completion() == 6.0  # three pages at half a page a second
    assert world.after(5.9) == []
    assert world.after(0.1) == [(StorageOp.WRITE, order, 3, None)]
    assert world.found(path(1, 2, 3)) == 3
    assert world.found(path(1, 2, 9)) == 2
    assert world.found(path(9, 2, 3)) == 0
    assert world.found(path(1, 2, 3), first=1) == 2
    assert world.found(path(1, 2, 3), namespace=Namespace("other")) == 0


def test_pages_that_are_there_are_not_written_again() -> None:
    world = World()
    world.copy(Purpose.STORE, path(1, 2))
    world.after(4.0)
    world.copy(Purpose.STORE, path(1, 2, 3), first=1)
    assert len(world.after(2.0)) == 1
    assert world.storage.written_pages == 3
    assert [call[3] for call in world.calls] == [200, 100]


def test_calls_of_one_direction_are_served_one_after_another() -> None:
    world = World()
    world.copy(Purpose.STORE, path(1))
    world.copy(Purpose.STORE, path(2))
    assert len(world.after(2.0)) == 1
    assert len(world.after(2.0)) == 1
    first, second = world.calls
    assert (first[1:3], second[1:3]) == ((0.0, 2.0), (2.0, 4.0))


def test_a_full_store_gives_up_the_oldest_path_from_its_tail() -> None:
    world = World(capacity=3)
    world.copy(Purpose.STORE, path(1, 2))
    world.copy(Purpose.STORE, path(5, 6))
    world.after(100.0)
    assert world.storage.held_pages == 3
    assert world.storage.evicted_pages == 1
    assert world.found(path(1, 2)) == 1
    assert world.found(path(5, 6)) == 2


def test_a_read_of_pages_that_have_gone_ends_as_missing() -> None:
    world = World()
    world.copy(Purpose.STORE, path(1))
    world.after(2.0)
    order = world.copy(Purpose.PREFETCH, path(1, 2))
    assert world.after(10.0) == [(StorageOp.READ, order, 1, FailReason.MISSING)]


def test_an_abandoned_read_keeps_what_has_arrived() -> None:
    world = World()
    world.copy(Purpose.STORE, path(1, 2, 3, 4))
    world.after(100.0)
    order = world.copy(Purpose.PREFETCH, path(1, 2, 3, 4))
    later = world.copy(Purpose.PREFETCH, path(1))
    world.clock.advance_to(world.clock() + 2.5)
    world.storage.abandon(StorageOp.READ, order, FailReason.DEADLINE)
    assert world.after(0.0) == [(StorageOp.READ, order, 2, FailReason.DEADLINE)]
    assert world.after(1.5) == [(StorageOp.READ, later, 1, None)]


def test_an_abandoned_order_that_has_not_begun_ends_at_once() -> None:
    world = World()
    world.copy(Purpose.STORE, path(1))
    order = world.copy(Purpose.STORE, path(2))
    world.storage.abandon(StorageOp.WRITE, order, FailReason.CANCELLED)
    assert world.after(0.0) == [(StorageOp.WRITE, order, 0, FailReason.CANCELLED)]


def test_a_write_under_way_ends_after_its_call() -> None:
    world = World()
    order = world.copy(Purpose.STORE, path(1))
    world.storage.abandon(StorageOp.WRITE, order, FailReason.DEADLINE)
    assert world.after(1.0) == []
    assert world.after(1.0) == [(StorageOp.WRITE, order, 1, None)]


def test_closing_ends_everything_exactly_once() -> None:
    world = World()
    world.copy(Purpose.STORE, path(1))
    world.copy(Purpose.STORE, path(2))
    world.storage.lookup(Lookup(1, NAMESPACE, path(1), 0, 1))
    assert world.storage.close(0.0)
    assert {end[3] for end in world.after(100.0)} == {FailReason.SHUTDOWN}
    assert world.after(100.0) == []
    assert world.storage.next_completion() == math.inf


def test_the_clock_does_not_go_back() -> None:
    clock = VirtualClock()
    clock.advance_to(2.0)
    with pytest.raises(ProtocolError, match="cannot go back"):
        clock.advance_to(1.0)
