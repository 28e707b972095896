"""Draining, detaching and closing, with and without a store that hangs."""

from __future__ import annotations

import pytest
from controller_world import PAGE_TOKENS, SPACE, World
from test_controller_late_copies import count, prompt_of, pump_until, serve

from kvtiers.runtime.storage_worker import StorageWorker
from kvtiers.testing.faulty_store import FaultyStore
from kvtiers.types import Purpose, SlotState, StorageOp, Tier


@pytest.fixture
def world() -> World:
    return World(seed=1, device_pages=16, host_pages=16)


def another_worker(world: World) -> StorageWorker:
    return StorageWorker(
        {"kv": FaultyStore(world.inner_store)},
        world.worker._pools,
        page_tokens=PAGE_TOKENS,
        layout="simulated",
        clock=world.clock,
    )


def test_draining_finishes_backups_and_the_stores_that_follow(world: World) -> None:
    serve(world, prompt_of(6, seed=1))
    serve(world, prompt_of(5, seed=2))
    assert world.controller.drain(10)
    assert world.ledger.copies[Purpose.STORE].ok_pages == 11
    assert world.inner_store.stats().pages == 11
    assert world.controller.close(10)


def test_what_was_stored_is_found_by_the_next_one_to_attach(world: World) -> None:
    prompt = prompt_of(6, seed=1)
    serve(world, prompt)
    assert world.controller.drain(10)
    assert world.controller.detach(10)
    for tier in (Tier.DEVICE, Tier.HOST):
        world.cache.flush(tier, world.now)
    assert world.cache.prefetch(7, prompt, SPACE, world.now) is None
    world.controller.attach(another_worker(world))
    ticket = world.cache.prefetch(8, prompt, SPACE, world.now)
    assert ticket is not None
    assert world.controller.drain(10)
    lease = world.cache.admit(8, prompt, SPACE, world.now, ticket_id=ticket)
    assert lease.split.storage_hit == 6 * PAGE_TOKENS  # type: ignore[union-attr]
    world.cache.abort(lease, world.now)  # type: ignore[arg-type]
    world.settle()


def test_detaching_a_store_that_hangs_says_so_and_settles_when_it_returns(world: World) -> None:
    world.store.hang(StorageOp.WRITE)
    serve(world, prompt_of(6, seed=1))
    pump_until(world, lambda: world.store.calls_hanging > 0)
    assert not world.controller.detach(0.01)
    assert not world.controller.storage_attached
    assert world.controller.oldest_pending()[Purpose.STORE].copies == 1
    serve(world, prompt_of(5, seed=2))  # the cache goes on without storage

    world.controller.attach(another_worker(world))
    serve(world, prompt_of(5, seed=3))
    world.store.release()
    pump_until(world, lambda: world.controller.idle)
    assert world.ledger.copies[Purpose.STORE].in_flight_pages == 0
    world.ledger.check()
    world.settle()


def test_a_store_that_hangs_after_its_detach_leaves_the_loop_at_rest(world: World) -> None:
    world.store.hang(StorageOp.WRITE)
    serve(world, prompt_of(6, seed=1))
    pump_until(world, lambda: world.store.calls_hanging > 0)
    assert not world.controller.detach(0.01)
    assert world.controller.drain(0) is False
    woken: list[bool] = []
    world.worker.on_result(lambda: woken.append(True))
    for _ in range(5):
        world.controller.pump()
    assert not woken  # each would end the wait for news, and the loop would not rest at all
    world.store.release()
    pump_until(world, lambda: world.controller.idle)
    world.settle()


def test_closing_acknowledges_what_had_not_begun_and_names_what_hangs(world: World) -> None:
    world.store.hang(StorageOp.WRITE)
    for seed in (1, 2):
        serve(world, prompt_of(5, seed=seed))
    pump_until(world, lambda: world.store.calls_hanging > 0)
    assert not world.controller.drain(0.01)
    assert not world.controller.close(0.01)
    pending = world.controller.oldest_pending()
    assert {purpose: p.copies for purpose, p in pending.items() if p.copies} == {Purpose.STORE: 1}
    world.ledger.check()
    assert count(world, Tier.HOST, SlotState.RESERVED) == 0
    world.store.release()
    pump_until(world, lambda: world.controller.idle)
    assert world.controller.close(10)
