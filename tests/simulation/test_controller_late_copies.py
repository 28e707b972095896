"""Copies that end after nobody waits for them any more: what they still touch belongs to nobody."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from controller_world import PAGE_TOKENS, SPACE, World

from kvtiers.core.interface import Blocked, LeaseView
from kvtiers.core.lease import Lease
from kvtiers.types import Purpose, SlotState, StorageOp, Tier, token_key


def prompt_of(pages: int, seed: int) -> bytes:
    """A prompt of that many whole pages and one token more."""
    rng = np.random.default_rng(seed)
    return token_key(rng.integers(0, 1000, pages * PAGE_TOKENS + 1))


def admit(world: World, prompt: bytes, ticket_id: int | None = None) -> LeaseView | Blocked:
    world.now += 0.01
    lease = world.cache.admit(7, prompt, SPACE, world.now, ticket_id=ticket_id)
    world.controller.pump()
    return lease  # type: ignore[return-value]


def compute_and_finish(world: World, lease: LeaseView, prompt: bytes) -> None:
    world._compute(lease, prompt, lease.shared_tokens)
    world.cache.commit(lease, prompt, len(prompt) // 4, world.now)
    world.check_pages(lease, prompt)
    world.cache.finish(lease, world.now)
    world.prompts.append(prompt)
    world.controller.pump()


def serve(world: World, prompt: bytes) -> LeaseView:
    """One request from admission to its end, waiting for whatever it needs."""
    deadline = time.monotonic() + 10
    while isinstance(lease := admit(world, prompt), Blocked):
        assert time.monotonic() < deadline, f"blocked on {lease.on}"
        world.controller.wait(0.01)
    while lease.load_ops:
        world.controller.wait(0.01)
        world.controller.pump()
    compute_and_finish(world, lease, prompt)
    return lease


def backed_up(world: World, prompt: bytes) -> None:
    """Serve a prompt, wait until host has it, and take it off the device."""
    serve(world, prompt)
    assert world.controller.drain(10)
    world.cache.flush(Tier.DEVICE, world.now)


def pump_until(world: World, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        world.controller.pump()
        time.sleep(0.001)


def pending_copies(world: World) -> int:
    return sum(pending.copies for pending in world.controller.oldest_pending().values())


def count(world: World, tier: Tier, state: SlotState) -> int:
    return world.cache.recount().get((tier, state), 0)


def miss_deadline(world: World, seconds: float = 2.5) -> None:
    world.now += seconds
    world.controller.pump()


@pytest.fixture
def world() -> World:
    return World(seed=1, device_pages=16, host_pages=16)


def test_a_late_load_writes_where_nobody_reads(world: World) -> None:
    prompt = prompt_of(6, seed=1)
    backed_up(world, prompt)
    world.gate.shut()
    lease = admit(world, prompt)
    assert isinstance(lease, Lease)
    assert lease.split.host_hit == 6 * PAGE_TOKENS
    assert not world.controller.wait_layer(lease.load_ops, 0, timeout_seconds=0.01)

    miss_deadline(world)
    assert lease.voided
    world.cache.abort(lease, world.now)
    assert count(world, Tier.DEVICE, SlotState.QUARANTINED) == 6

    # The slots that are left are filled to the last one, and must not be written by the late copy.
    world.gate.overtake()
    others = [prompt_of(4, seed=seed) for seed in (2, 3)]
    leases = [admit(world, other) for other in others]
    for lease, other in zip(leases, others, strict=True):
        assert isinstance(lease, Lease)
        world._compute(lease, other, 0)
    world.gate.release()
    assert world.controller.drain(10)
    assert count(world, Tier.DEVICE, SlotState.QUARANTINED) == 0
    for lease, other in zip(leases, others, strict=True):
        assert isinstance(lease, Lease)
        world.cache.commit(lease, other, len(other) // 4, world.now)
        world.check_pages(lease, other)
        world.cache.finish(lease, world.now)
    again = serve(world, prompt)
    assert again.split.prompt == len(prompt) // 4
    world.settle()


def test_a_late_backup_leaves_the_page_unbacked_and_its_host_slots_alone(world: World) -> None:
    world.gate.shut()
    prompt = prompt_of(6, seed=1)
    serve(world, prompt)
    assert world.controller.oldest_pending()[Purpose.BACKUP].copies == 1
    miss_deadline(world)
    assert count(world, Tier.HOST, SlotState.QUARANTINED) == 6
    assert world.ledger.backup.ok_pages == 0

    world.gate.overtake()
    for seed in (2, 3):
        serve(world, prompt_of(5, seed=seed))
        pump_until(world, lambda: pending_copies(world) == 1)  # the late one
        world.cache.flush(Tier.DEVICE, world.now)
    world.gate.release()
    world.controller.drain(10)
    assert count(world, Tier.HOST, SlotState.QUARANTINED) == 0
    for seed in (2, 3):
        lease = serve(world, prompt_of(5, seed=seed))  # from host, if it is still there
        assert lease.split.device_hit == 0
    world.settle()


def test_a_late_store_never_writes_another_pages_bytes_under_this_pages_name(
    world: World,
) -> None:
    world.store.hang(StorageOp.WRITE)
    prompt = prompt_of(6, seed=1)
    serve(world, prompt)
    pump_until(world, lambda: world.store.calls_hanging > 0)
    miss_deadline(world)
    assert world.ledger.copies[Purpose.STORE].late_pages == 6
    world.cache.flush(Tier.DEVICE, world.now)

    # Everything else that passes through host must not get the pages that the store still reads.
    for seed in range(2, 8):
        serve(world, prompt_of(8, seed=seed))
        world.cache.evict(Tier.HOST, 16, world.now)
    world.store.release()
    assert world.controller.drain(10)
    world.settle()
    assert world.reached.get("stored page checked"), "the batch that hung was written after all"


def test_a_read_that_never_returns_meets_its_deadline_and_the_request_recomputes(
    world: World,
) -> None:
    prompt = prompt_of(6, seed=1)
    backed_up(world, prompt)
    world.cache.flush(Tier.HOST, world.now)
    world.store.hang(StorageOp.READ)
    ticket = world.cache.prefetch(7, prompt, SPACE, world.now)
    assert ticket is not None
    pump_until(world, lambda: world.store.calls_hanging > 0)
    blocked = admit(world, prompt, ticket)
    assert isinstance(blocked, Blocked)

    miss_deadline(world)
    world.controller.pump()
    assert count(world, Tier.HOST, SlotState.QUARANTINED) == 0, "its slots are free at once"
    lease = admit(world, prompt, ticket)
    assert isinstance(lease, Lease)
    assert lease.split.storage_hit == 0
    assert lease.split.computed == len(prompt) // 4
    compute_and_finish(world, lease, prompt)
    other = prompt_of(9, seed=2)
    serve(world, other)  # takes the slots that the read was meant for
    world.store.release()
    world.cache.flush(Tier.DEVICE, world.now)
    serve(world, other)
    world.settle()
